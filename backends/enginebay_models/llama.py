"""The Llama family: Llama 2 and 3.x, TinyLlama, SmolLM and others that say LlamaForCausalLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.model import Model, ModelFamily
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.hf_config import flag, read_decoder


class LlamaFamily(ModelFamily):
    """Grouped-query attention to everything before, rotary positions, a gated MLP; biases where the config says so."""

    name = "llama"
    architectures = ("LlamaForCausalLM",)

    def build(self, config: Mapping[str, Any], *, dtype: str, num_shards: int = 1) -> Model:
        decoder = read_decoder(config)
        attention_bias = flag(config, "attention_bias", default=False)
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qkv_bias=attention_bias,
            out_bias=attention_bias,
            mlp_bias=flag(config, "mlp_bias", default=False),
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = LlamaFamily()
