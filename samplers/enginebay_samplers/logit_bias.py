"""The processor logit_bias: adds values to the logits of single tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from enginebay.contracts.processor import LogitsProcessor, ProcessorState, RowFacts, RowField, Sizes
from enginebay.contracts.sampler import SamplingState
from enginebay_samplers.tokens import check_ids, check_number

MAX_BIASED = 1024
"""Max number of biased tokens of a request."""

Bias = Annotated[float, Field(ge=-100.0, le=100.0, strict=True)]


class LogitBiasOptions(BaseModel):
    """Options of the processor logit_bias."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        json_schema_extra={"examples": [{"bias": {"3": 5.0, "7": -100.0, "11": 0.5}}]},
    )

    bias: dict[int, Bias] = Field(
        default_factory=dict,
        description=f"token id to what is added, -100 to 100; at most {MAX_BIASED}",
    )


class LogitBias(LogitsProcessor):
    """logits + bias, as the OpenAI API has it: -100 all but bans a token, 100 all but
    chooses it.
    """

    def fields(self, sizes: Sizes) -> Mapping[str, RowField]:
        """Return token ids (the vocabulary's size in unused places) and their biases."""
        return {
            "ids": RowField("int32", (MAX_BIASED,)),
            "values": RowField("float32", (MAX_BIASED,)),
        }

    def row(self, options: Any, facts: RowFacts) -> Mapping[str, Any]:
        """Return the arrays of a row; RequestError for too many tokens or ids outside the
        vocabulary.
        """
        bias, vocab = options.bias, facts.sizes.vocab_size
        check_number("tokens with a bias", len(bias), MAX_BIASED)
        check_ids("logit_bias", bias, facts.sizes.num_token_ids)
        ids, values = np.full(MAX_BIASED, vocab), np.zeros(MAX_BIASED)
        ids[: len(bias)], values[: len(bias)] = list(bias), list(bias.values())
        return {"ids": ids, "values": values}

    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        """Return the changed logits, f32 [S, vocab]."""
        row = jnp.arange(logits.shape[0])[:, None]
        return logits.at[row, processor_state["ids"]].add(processor_state["values"], mode="drop")
