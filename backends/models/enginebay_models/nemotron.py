"""The Nemotron family (Minitron): LayerNorms with factors 1 + weight, and a plain MLP of squared
ReLU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.blocks import plain_mlp
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import flag
from enginebay_models.hf_config import FULL, check_layer_types, read_decoder

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "partial_rotary_factor": 0.5,
}


class NemotronFamily(ModelFamily):
    """Full attention, rotary positions in `partial_rotary_factor` of each head; LayerNorms with
    factors 1 + weight; a plain MLP.

    Biases: `attention_bias`, `mlp_bias`.
    """

    name = "nemotron"
    architectures = ("NemotronForCausalLM",)

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
            max_model_len=max_model_len,
            eps=("norm_eps", 1e-5),
            partial=True,
        )
        check_layer_types(config, decoder.num_layers, (FULL,))
        bias = flag(config, "attention_bias", default=False)
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=flag(config, "mlp_bias", default=False),
            layer_norms=True,
            norm_bias=True,
            norm_offset=1.0,
            mlp=plain_mlp,
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = NemotronFamily()
