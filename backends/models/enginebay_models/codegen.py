"""The CodeGen family: GPT-J with queries, values and keys in one tensor, by blocks of heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.model import Model, ModelFamily
from enginebay_models.fields import bad_field, positive, with_own_names
from enginebay_models.gptj import USUAL, build_gptj
from enginebay_models.tensors import NUM_BLOCKS


class CodeGenFamily(ModelFamily):
    """As `gptj`, with a number of heads that four divides."""

    name = "codegen"
    architectures = ("CodeGenForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        heads = positive(with_own_names(config, USUAL), "n_head", 16)
        if heads % NUM_BLOCKS:
            raise bad_field("n_head", heads, f"a multiple of {NUM_BLOCKS}")
        return build_gptj(
            self.name,
            config,
            "blocks",
            dtype=dtype,
            num_shards=num_shards,
            max_model_len=max_model_len,
        )


family = CodeGenFamily()
