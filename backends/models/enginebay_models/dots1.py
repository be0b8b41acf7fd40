"""The dots1 family (dots.llm1): attention of Qwen3, and the experts of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.experts import experts_or_mlp, read_sigmoid_experts, shared_mlp
from enginebay_models.fields import flag, positive, with_own_names
from enginebay_models.hf_config import layer_windows, read_decoder

_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "max_window_layers": 62,
    "norm_topk_prob": False,
}
_USUAL = {"n_routed_experts": "num_local_experts"}
"""A field of config.json, and its name in other families, which it may have too."""


class Dots1Family(ModelFamily):
    """Attention with norms of queries and keys. Layers from `max_window_layers` have the window
    `sliding_window`, or those that `layer_types` names. Biases: `attention_bias`.

    Layers from `first_k_dense_replace` have experts, as in `deepseek_v3`; `n_shared_experts` more
    compute every token.
    """

    name = "dots1"
    architectures = ("Dots1ForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        config = _DEFAULTS | with_own_names(config, _USUAL)
        decoder = read_decoder(config, kv_heads=32, max_model_len=max_model_len)
        positive(config, "num_experts_per_tok")  # has no default here
        experts = read_sigmoid_experts(
            config,
            decoder.num_layers,
            count=positive(config, "n_routed_experts"),
            width=1408,
            groups=(1, 1),
            first=0,
            scale=1.0,
        )
        shared = positive(config, "n_shared_experts")
        bias = flag(config, "attention_bias", default=False)
        variant = Variant(
            windows=layer_windows(config | {"use_sliding_window": True}, decoder.num_layers),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=True,
            mlp=experts_or_mlp(decoder, experts, shared_mlp(decoder, shared * experts.width)),
            mlp_config=(experts, shared),
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = Dots1Family()
