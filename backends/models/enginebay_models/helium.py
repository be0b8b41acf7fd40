"""The Helium family: Llama whose rotary pairs lie beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import flag
from enginebay_models.hf_config import read_decoder
from enginebay_models.tensors import QkvRows

_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 4096, "rope_theta": 100000.0}


class HeliumFamily(ModelFamily):
    """Full attention, with rotary pairs of neighbours. Biases: `attention_bias`, of queries, keys
    and values, and `mlp_bias`.
    """

    name = "helium"
    architectures = ("HeliumForCausalLM",)

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
            head_dim=128,
            kv_heads=20,
            max_model_len=max_model_len,
            eps=("rms_norm_eps", 1e-8),
        )
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qkv_bias=flag(config, "attention_bias", default=False),
            mlp_bias=flag(config, "mlp_bias", default=False),
            qkv_rows=QkvRows(interleaved=decoder.rope.rotary_dim),
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = HeliumFamily()
