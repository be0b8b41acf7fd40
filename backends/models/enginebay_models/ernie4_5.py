"""The ERNIE 4.5 family (dense): Llama with the features of a rotary pair beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import flag
from enginebay_models.hf_config import FULL, check_layer_types, read_decoder
from enginebay_models.tensors import QkvRows

_DEFAULTS: dict[str, Any] = {
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}


class Ernie45Family(ModelFamily):
    """Full attention, with rotary pairs of neighbours. Biases: `use_bias`."""

    name = "ernie4_5"
    architectures = ("Ernie4_5ForCausalLM",)

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
            kv_heads=2,
            max_model_len=max_model_len,
            eps=("rms_norm_eps", 1e-5),
        )
        check_layer_types(config, decoder.num_layers, (FULL,))
        bias = flag(config, "use_bias", default=False)
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
            qkv_rows=QkvRows(interleaved=decoder.rope.rotary_dim),
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = Ernie45Family()
