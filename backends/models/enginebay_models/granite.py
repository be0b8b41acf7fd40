"""The Granite family (3.x, dense): Llama with factors on embeddings, scores, branches, logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.blocks import InputRule, LogitRule, Residual
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import flag, number
from enginebay_models.hf_config import FULL, check_layer_types, read_decoder


class GraniteFamily(ModelFamily):
    """Full attention; factors on embeddings, scores, branches and logits. Biases: `attention_bias`,
    `mlp_bias`.
    """

    name = "granite"
    architectures = ("GraniteForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        shared = {"max_position_embeddings": 2048} | dict(config)
        decoder = read_decoder(shared, max_model_len=max_model_len)
        check_layer_types(config, decoder.num_layers, (FULL,))
        bias = flag(config, "attention_bias", default=False)
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=flag(config, "mlp_bias", default=False),
            softmax_scale=number(config, "attention_multiplier", 1.0),
            residual=Residual(scale=number(config, "residual_multiplier", 1.0)),
            inputs=InputRule(scale=number(config, "embedding_multiplier", 1.0)),
            logits=LogitRule(scale=1 / number(config, "logits_scaling", 1.0)),
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = GraniteFamily()
