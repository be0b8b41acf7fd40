"""The InternLM 3 family: Llama with one switch for the biases of queries, keys and values, and
another for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import bad_field, flag, with_own_names
from enginebay_models.hf_config import FULL, check_layer_types, read_decoder

_DEFAULTS: dict[str, Any] = {
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768,
}
_KV_HEADS = 2
_USUAL = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}
"""Own name of a field -> name in other families."""


class InternLM3Family(ModelFamily):
    """Full attention and a gated MLP. Biases: `qkv_bias`, or `attention_bias`, of queries, keys and
    values; `bias`, or `mlp_bias`, of attention's output and of MLPs.
    """

    name = "internlm3"
    architectures = ("InternLM3ForCausalLM",)

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
            kv_heads=_KV_HEADS,
            max_model_len=max_model_len,
        )
        if decoder.hidden_size % decoder.num_q_heads:
            allowed = f"a multiple of num_attention_heads = {decoder.num_q_heads}"
            raise bad_field("hidden_size", decoder.hidden_size, allowed)
        check_layer_types(config, decoder.num_layers, (FULL,))
        own = with_own_names(config, _USUAL)
        others = flag(own, "bias", default=False)
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qkv_bias=flag(own, "qkv_bias", default=False),
            out_bias=others,
            mlp_bias=others,
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = InternLM3Family()
