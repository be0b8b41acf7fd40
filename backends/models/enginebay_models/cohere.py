"""The Cohere family (Command R, Aya): attention and MLP read the same norm, and add to the same
stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.blocks import LogitRule, Residual
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import flag, number, refuse_others
from enginebay_models.hf_config import FULL, check_layer_types, read_decoder
from enginebay_models.tensors import QkvRows

_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}


class CohereFamily(ModelFamily):
    """Full attention, parallel to the MLP, with rotary pairs of neighbours; LayerNorms without
    biases; `logit_scale`.

    Norms of queries and keys (`use_qk_norm`, Command R+) are refused. Biases: `attention_bias`.
    """

    name = "cohere"
    architectures = ("CohereForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        refuse_others(config, {"use_qk_norm": False})
        shared = _DEFAULTS | dict(config)
        decoder = read_decoder(shared, max_model_len=max_model_len, eps=("layer_norm_eps", 1e-5))
        check_layer_types(config, decoder.num_layers, (FULL,))
        bias = flag(config, "attention_bias", default=False)
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qkv_bias=bias,
            out_bias=bias,
            qkv_rows=QkvRows(interleaved=decoder.rope.rotary_dim),
            mlp_norm=False,
            layer_norms=True,
            residual=Residual(parallel=True),
            logits=LogitRule(scale=number(config, "logit_scale", 0.0625)),
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = CohereFamily()
