"""The Seed-OSS family: Llama with separate switches for the biases of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import flag
from enginebay_models.hf_config import read_decoder

_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 524288, "head_dim": 128}


class SeedOssFamily(ModelFamily):
    """Full attention. Biases: `attention_bias`, of queries, keys and values, which is true if
    absent; `attention_out_bias`; `mlp_bias`.
    """

    name = "seed_oss"
    architectures = ("SeedOssForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        decoder = read_decoder(_DEFAULTS | dict(config), kv_heads=8, max_model_len=max_model_len)
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qkv_bias=flag(config, "attention_bias", default=True),
            out_bias=flag(config, "attention_out_bias", default=False),
            mlp_bias=flag(config, "mlp_bias", default=False),
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = SeedOssFamily()
