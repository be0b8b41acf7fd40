"""The Granite MoE family with shared experts: `granitemoe`, and an MLP for every token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.fields import whole_number
from enginebay_models.granitemoe import build_granite_moe


class GraniteMoeSharedFamily(ModelFamily):
    """As `granitemoe`, with an MLP of width `shared_intermediate_size` beside the experts of each
    layer, unless it is 0. Biases: `attention_bias`.
    """

    name = "granitemoeshared"
    architectures = ("GraniteMoeSharedForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        return build_granite_moe(
            self.name,
            config,
            dtype=dtype,
            num_shards=num_shards,
            max_model_len=max_model_len,
            shared_width=whole_number(config, "shared_intermediate_size", 0, least=0),
        )


family = GraniteMoeSharedFamily()
