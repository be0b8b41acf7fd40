"""The Gemma family of the first generation: scaled embeddings, and factors 1 + weight in norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.blocks import InputRule
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import flag, refuse_others
from enginebay_models.hf_config import FULL, check_layer_types, read_decoder

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_SERVED = {"use_bidirectional_attention": False, "hidden_activation": "gelu_pytorch_tanh"}


class GemmaFamily(ModelFamily):
    """Full attention, norms with factors 1 + weight, and scaled embeddings. Biases:
    `attention_bias`.
    """

    name = "gemma"
    architectures = ("GemmaForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        refuse_others(config, _SERVED)
        shared = _DEFAULTS | dict(config)
        if shared["hidden_act"] == "gelu":  # what the first files say of the approximation by tanh
            shared["hidden_act"] = "gelu_pytorch_tanh"
        decoder = read_decoder(shared, head_dim=256, kv_heads=16, max_model_len=max_model_len)
        check_layer_types(config, decoder.num_layers, (FULL,))
        bias = flag(config, "attention_bias", default=False)
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qkv_bias=bias,
            out_bias=bias,
            norm_offset=1.0,
            inputs=InputRule(scale=decoder.hidden_size**0.5),
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = GemmaFamily()
