"""The Gemma 2 family: every second layer has a window, and scores and logits have caps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.blocks import InputRule, LogitRule
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import flag, number, optional_number, positive, refuse_others
from enginebay_models.hf_config import DEFAULT_WINDOW, mixed_windows, read_decoder

_DEFAULTS: dict[str, Any] = {
    "num_attention_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


class Gemma2Family(ModelFamily):
    """A window in every second layer, or as `layer_types` says; caps of scores and logits; norms
    before and after attention and MLP.

    Norms have factors 1 + weight, and embeddings are scaled. Biases: `attention_bias`.
    """

    name = "gemma2"
    architectures = ("Gemma2ForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        refuse_others(config, {"use_bidirectional_attention": False})
        shared = _DEFAULTS | dict(config)
        shared["hidden_act"] = config.get("hidden_activation", "gelu_pytorch_tanh")
        decoder = read_decoder(shared, head_dim=256, kv_heads=4, max_model_len=max_model_len)
        bias = flag(config, "attention_bias", default=False)
        window = positive(config, "sliding_window", DEFAULT_WINDOW)
        variant = Variant(
            windows=mixed_windows(config, decoder.num_layers, window, every=2),
            qkv_bias=bias,
            out_bias=bias,
            softmax_scale=number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
            softcap=optional_number(config, "attn_logit_softcapping", 50.0),
            out_norms=True,
            norm_offset=1.0,
            inputs=InputRule(scale=decoder.hidden_size**0.5),
            logits=LogitRule(cap=optional_number(config, "final_logit_softcapping", 30.0)),
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = Gemma2Family()
