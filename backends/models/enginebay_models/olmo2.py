"""The OLMo 2 family: norms of the results of attention and MLP, and none before them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import flag
from enginebay_models.hf_config import FULL, check_layer_types, read_decoder


class Olmo2Family(ModelFamily):
    """Full attention; one norm each over all queries and all keys; norms after attention and MLP
    only. Biases: `attention_bias`.
    """

    name = "olmo2"
    architectures = ("Olmo2ForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        shared = {"max_position_embeddings": 2048} | dict(config)
        decoder = read_decoder(shared, max_model_len=max_model_len, eps=("rms_norm_eps", 1e-5))
        check_layer_types(config, decoder.num_layers, (FULL,))
        bias = flag(config, "attention_bias", default=False)
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=True,
            qk_norm_joint=True,
            in_norms=False,
            out_norms=True,
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = Olmo2Family()
