"""The GLM-4 MoE family (GLM-4.5, 4.6): routed experts, chosen by sigmoids, and shared ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.experts import experts_or_mlp, read_sigmoid_experts, shared_mlp
from enginebay_models.fields import flag, positive
from enginebay_models.hf_config import later_layers, read_decoder

_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 131072, "partial_rotary_factor": 0.5}


class Glm4MoeFamily(ModelFamily):
    """Full attention, with rotary positions in `partial_rotary_factor` of each head; queries and
    keys are normed if `use_qk_norm`. Biases: `attention_bias`, of queries, keys and values.

    Layers from `first_k_dense_replace` have experts, as in `deepseek_v3`; `n_shared_experts` more
    compute every token.
    """

    name = "glm4_moe"
    architectures = ("Glm4MoeForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        decoder = read_decoder(
            _DEFAULTS | dict(config),
            kv_heads=8,
            max_model_len=max_model_len,
            eps=("rms_norm_eps", 1e-5),
            partial=True,
        )
        experts = read_sigmoid_experts(
            config,
            decoder.num_layers,
            count=128,
            width=1408,
            groups=(1, 1),
            first=1,
            scale=1.0,
        )
        shared = positive(config, "n_shared_experts", 1)
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qkv_bias=flag(config, "attention_bias", default=False),
            qk_norm=flag(config, "use_qk_norm", default=False),
            mlp=experts_or_mlp(decoder, experts, shared_mlp(decoder, shared * experts.width)),
            mlp_config=(experts, shared),
            unused=later_layers(config, decoder.num_layers),
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = Glm4MoeFamily()
