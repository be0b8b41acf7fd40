"""The GLM-4 family (dense): the rotary pairs of a part of each head lie beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.blocks import FusedMlp
from enginebay_models.checkpoint import read_architecture
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import flag
from enginebay_models.hf_config import FULL, check_layer_types, read_decoder
from enginebay_models.tensors import QkvRows

_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 131072, "partial_rotary_factor": 0.5}
_NAMES = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
"""(name of a norm in other families, name in this checkpoint) pairs."""


class Glm4Family(ModelFamily):
    """Full attention, with rotary pairs of neighbours in `partial_rotary_factor` of each head.

    `Glm4ForCausalLM` also norms the results of attention and MLP. Biases: `attention_bias`, of
    queries, keys and values.
    """

    name = "glm4"
    architectures = ("Glm4ForCausalLM", "GlmForCausalLM")

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
            kv_heads=2,
            max_model_len=max_model_len,
            eps=("rms_norm_eps", 1.5625e-7),
            partial=True,
        )
        check_layer_types(config, decoder.num_layers, (FULL,))
        sandwich = read_architecture(config) != "GlmForCausalLM"
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qkv_bias=flag(config, "attention_bias", default=True),
            qkv_rows=QkvRows(interleaved=decoder.rope.rotary_dim),
            out_norms=sandwich,
            mlp=FusedMlp,
            names=_NAMES if sandwich else {},
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = Glm4Family()
