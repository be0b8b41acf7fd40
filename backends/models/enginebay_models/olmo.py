"""The OLMo family (the first one): Llama with LayerNorms that have no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import flag, number
from enginebay_models.hf_config import read_decoder

_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 2048}
_EPS = {"rms_norm_eps": 1e-5}
"""The same for all checkpoints, whatever their config.json says."""


class OlmoFamily(ModelFamily):
    """Full attention; LayerNorms without weights or biases. Queries, keys and values are clipped to
    `clip_qkv`. Biases: `attention_bias`.
    """

    name = "olmo"
    architectures = ("OlmoForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        decoder = read_decoder(_DEFAULTS | dict(config) | _EPS, max_model_len=max_model_len)
        bias = flag(config, "attention_bias", default=False)
        clip = None if config.get("clip_qkv") is None else number(config, "clip_qkv", 1.0)
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qkv_bias=bias,
            out_bias=bias,
            qkv_clip=clip,
            layer_norms=True,
            norm_weight=False,
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = OlmoFamily()
