"""The Llama family: Llama 2 and 3.x, TinyLlama, SmolLM and others with LlamaForCausalLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import bad_field, flag
from enginebay_models.hf_config import FULL, check_layer_types, read_decoder


class LlamaFamily(ModelFamily):
    """Full grouped-query attention, rotary positions and a gated MLP. Biases: `attention_bias`,
    `mlp_bias`.
    """

    name = "llama"
    architectures = ("LlamaForCausalLM", "LLaMAForCausalLM")

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        decoder = read_decoder(config, max_model_len=max_model_len)
        if decoder.hidden_size % decoder.num_q_heads:
            allowed = f"a multiple of num_attention_heads = {decoder.num_q_heads}"
            raise bad_field("hidden_size", decoder.hidden_size, allowed)
        check_layer_types(config, decoder.num_layers, (FULL,))
        attention_bias = flag(config, "attention_bias", default=False)
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qkv_bias=attention_bias,
            out_bias=attention_bias,
            mlp_bias=flag(config, "mlp_bias", default=False),
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = LlamaFamily()
