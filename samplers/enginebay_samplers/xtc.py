"""The processor xtc: sometimes removes the most likely tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
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
from enginebay.ops.sampling import position_keys
from enginebay.row_value import RowValue
from enginebay_samplers.distribution import distribution, keep

XTC_STREAM = 0x585443
"""The random stream, of a position's key, that decides whether tokens are removed."""


class XtcOptions(BaseModel):
    """Options of the processor xtc."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [
                {"threshold": 0.05, "probability": 1.0},
                {"threshold": 0.02, "probability": 0.5},
                {"threshold": 0.6, "probability": 1.0},
            ]
        },
    )

    threshold: Annotated[float, RowValue("float32")] = Field(
        default=0.1,
        ge=0.0,
        le=1.0,
        description="a token with at least this probability is a top choice",
    )
    probability: Annotated[float, RowValue("float32")] = Field(
        default=0.5, ge=0.0, le=1.0, description="probability that top choices are removed"
    )


class Xtc(LogitsProcessor):
    """Removes top choices with probability `probability`.

    Top choices are the tokens with a probability of at least `threshold`. The least likely of them,
    and tokens equal to it, stay. With fewer than two top choices nothing changes. The request's key
    decides at which positions it happens. "Exclude top choices": P. E. Weidmann,
    text-generation-webui, pull request 6335, 2024.
    """

    def fields(self, sizes: Sizes) -> Mapping[str, RowField]:
        """Return one field per option."""
        return option_fields(XtcOptions)

    def row(self, options: Any, facts: RowFacts) -> Mapping[str, Any]:
        """Return the values of a row; all options are allowed."""
        return option_values(options)

    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        """Return the changed logits, f32 [S, vocab]."""
        given = distribution(logits, state)
        top = jnp.exp(given.log_p) >= processor_state["threshold"][:, None]
        top = top & jnp.isfinite(logits)
        least = jnp.where(top, logits, jnp.inf).min(axis=-1, keepdims=True)
        # The words of a key are random bits, because deriving a key draws them.
        bits = jax.random.key_data(position_keys(state, XTC_STREAM))[:, :1]
        happens = (bits >> 8).astype(jnp.int32).astype(jnp.float32) * 2.0**-24 < processor_state[
            "probability"
        ][:, None]
        return keep(logits, ~happens | ~top | (logits == least), given)
