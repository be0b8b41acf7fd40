"""Penalties: tokens that a row already has get lower or higher scores, before any other change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from pydantic import BaseModel, ConfigDict, Field

from enginebay.contracts.processor import (
    LogitsProcessor,
    ProcessorState,
    RowFacts,
    RowField,
    Sizes,
    option_fields,
    option_values,
)
from enginebay.contracts.sampler import SamplingState
from enginebay.row_value import RowValue
from enginebay_samplers.tokens import is_among


class _PenaltyValues(NamedTuple):
    """The penalties of S rows: f32 [S] each, and bool [S] for repetition counted over the output
    only.
    """

    presence: jax.Array
    frequency: jax.Array
    repetition: jax.Array
    output_only: jax.Array


def penalize(logits: jax.Array, state: SamplingState) -> jax.Array:
    """Return logits f32 [S, vocab] after the penalties of the rows: repetition, then frequency,
    then presence.

    While no row uses a penalty, nothing is computed.
    """
    strengths = _PenaltyValues(
        state.params.presence_penalty,
        state.params.frequency_penalty,
        state.params.repetition_penalty,
        jnp.zeros(state.params.repetition_penalty.shape, bool),
    )
    return lax.cond(
        jnp.any(penalizes(state)), lambda: _penalized(logits, strengths, state), lambda: logits
    )


def penalizes(state: SamplingState) -> jax.Array:
    """Return bool [S], whether a row has a penalty that is not neutral."""
    counted = (state.params.presence_penalty != 0.0) | (state.params.frequency_penalty != 0.0)
    return counted | (state.params.repetition_penalty != 1.0)


def _penalized(logits: jax.Array, strengths: _PenaltyValues, state: SamplingState) -> jax.Array:
    num_rows, vocab = logits.shape
    row = jnp.arange(num_rows)[:, None]
    position = jnp.arange(state.token_ids.shape[1])[None]
    known = position < state.positions[:, None]
    written = known & (position >= state.prompt_lengths[:, None])
    counts = jnp.where(strengths.output_only[:, None], written, known)
    seen = is_among(jnp.where(counts, state.token_ids, vocab), vocab)
    count = jnp.zeros((num_rows, vocab), jnp.int32)
    count = count.at[row, jnp.where(written, state.token_ids, vocab)].add(1, mode="drop")
    repetition = strengths.repetition[:, None]
    repeated = jnp.where(logits > 0.0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, repeated, logits)
    logits = logits - count.astype(jnp.float32) * strengths.frequency[:, None]
    return logits - jnp.where(count > 0, strengths.presence[:, None], 0.0)


class PenaltiesOptions(BaseModel):
    """The strength of each penalty on tokens that occurred before."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [
                {"presence": 1.5},
                {"frequency": -0.5, "repetition": 1.4},
                {"presence": 0.3, "repetition": 0.7, "output_only": True},
            ]
        },
    )

    presence: Annotated[float, RowValue("float32")] = Field(
        default=0.0,
        ge=-2.0,
        le=2.0,
        description="subtracted from the logit of each token in the output",
    )
    frequency: Annotated[float, RowValue("float32")] = Field(
        default=0.0,
        ge=-2.0,
        le=2.0,
        description="subtracted from a token's logit for each time it is in the output",
    )
    repetition: Annotated[float, RowValue("float32", lowest=1e-30, highest=1e30)] = Field(
        default=1.0,
        gt=0.0,
        allow_inf_nan=False,
        description="divides the logit of a token in prompt or output if positive, "
        "else multiplies it",
    )
    output_only: Annotated[bool, RowValue("bool")] = Field(
        default=False, description="repetition only counts tokens of the output"
    )


class Penalties(LogitsProcessor):
    """Applies repetition, then frequency, then presence.

    Repetition follows Keskar, McCann, Varshney, Xiong and Socher, "CTRL", 2019 (section 4.1), with
    negative logits multiplied; frequency and presence are those of the OpenAI API.
    """

    reads_tokens = True

    def fields(self, sizes: Sizes) -> Mapping[str, RowField]:
        """Return the fields: the options."""
        return option_fields(PenaltiesOptions)

    def row(self, options: Any, facts: RowFacts) -> Mapping[str, Any]:
        """Return the values of the fields. A repetition penalty too large for f32 scores is
        replaced by the largest that fits.
        """
        return option_values(options)

    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        """Return f32 [S, vocab]."""
        return _penalized(
            logits,
            _PenaltyValues(*(processor_state[name] for name in _PenaltyValues._fields)),
            state,
        )
