"""The Phi-3 family (Phi-3, Phi-3.5, Phi-4): queries, keys and values are one tensor, gate and up
another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.blocks import FusedMlp
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import bad_field
from enginebay_models.hf_config import every_window, read_decoder
from enginebay_models.tensors import QkvRows


class Phi3Family(ModelFamily):
    """Full attention, or a window of `sliding_window` tokens; rotary positions may be partial, or
    scaled by `longrope`.
    """

    name = "phi3"
    architectures = ("Phi3ForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        decoder = read_decoder(
            _with_longrope(config),
            max_model_len=max_model_len,
            eps=("rms_norm_eps", 1e-5),
            partial=True,
        )
        variant = Variant(
            windows=every_window(config, decoder.num_layers),
            qkv_rows=QkvRows("stacked"),
            mlp=FusedMlp,
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


def _with_longrope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with the rule's present name. Files of the first models name it su
    or yarn, and leave out the original context of 4096.
    """
    fields: dict[str, Any] = {"max_position_embeddings": 4096} | dict(config)
    for name in ("rope_parameters", "rope_scaling"):
        rule = fields.get(name)
        if not isinstance(rule, Mapping):
            continue
        kind = rule.get("rope_type", rule.get("type", "default"))
        if kind not in ("default", "longrope", "su", "yarn"):
            raise bad_field(f"{name}.rope_type", kind, "default, longrope")
        if kind != "default":
            fields[name] = dict(rule) | {"rope_type": "longrope"}
            fields.setdefault("original_max_position_embeddings", 4096)
    return fields


family = Phi3Family()
