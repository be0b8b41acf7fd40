"""The Ministral 3 family (text): Llama with a factor on queries that grows with the position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.blocks import QueryScale
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import bad_field, is_number, number
from enginebay_models.hf_config import every_window, read_decoder

_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 262144}
_BETA, _ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"
_RULE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    _ORIGINAL: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _BETA: 0.1,
}
"""The rotary rule of a file that has none."""


class Ministral3Family(ModelFamily):
    """Full attention, or a window of `sliding_window` tokens. The rotary rule has the factor on
    queries, `llama_4_scaling_beta`, for each `original_max_position_embeddings` positions.
    """

    name = "ministral3"
    architectures = ("Ministral3ForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        shared = _DEFAULTS | dict(config)
        if not (config.get("rope_parameters") or config.get("rope_scaling")):
            shared["rope_parameters"] = _RULE
        decoder = read_decoder(
            shared,
            head_dim=128,
            kv_heads=8,
            max_model_len=max_model_len,
            eps=("rms_norm_eps", 1e-5),
        )
        variant = Variant(
            windows=every_window(config, decoder.num_layers), query_scale=_query_scale(shared)
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


def _query_scale(config: Mapping[str, Any]) -> QueryScale:
    """Read the factor on queries; a file with two rotary rules must have it in both."""
    found = list[QueryScale]()
    for name in ("rope_parameters", "rope_scaling"):
        rule = config.get(name)
        if not rule:
            continue
        beta, own = rule.get(_BETA), config if _ORIGINAL in config else rule
        if not is_number(beta) or beta < 0:
            raise bad_field(f"{name}.{_BETA}", beta, "a number of at least 0")
        if not is_number(own.get(_ORIGINAL)):
            raise bad_field(f"{name}.{_ORIGINAL}", own.get(_ORIGINAL), "a positive number")
        found.append(
            QueryScale(float(beta), number(own, _ORIGINAL, 1.0, path=f"{name}.{_ORIGINAL}"))
        )
        if found[-1] != found[0]:
            raise bad_field(f"{name}.{_BETA}", beta, "that of rope_parameters")
    return found[0]


family = Ministral3Family()
