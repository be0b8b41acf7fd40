"""The processor xtc: now and then, the likeliest tokens are left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from pydantic import BaseModel, ConfigDict, Field

from enginebay.processor import (
    LogitsProcessor,
    ProcessorState,
    RowFacts,
    RowField,
    Sizes,
    option_fields,
    option_values,
)
from enginebay.row_value import RowValue
from enginebay.sampler import SamplingState, position_keys
from enginebay_samplers.distribution import distribution, keep

XTC_STREAM = 0x585443
"""The stream of a position's key that says whether tokens are left out there."""


class XtcOptions(BaseModel):
    """Which tokens are left out, and how often."""

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
        description="probability that makes a token one of the top choices",
    )
    probability: Annotated[float, RowValue("float32")] = Field(
        default=0.5, ge=0.0, le=1.0, description="how often they are left out"
    )


class Xtc(LogitsProcessor):
    """With chance `probability`, of the tokens of probability `threshold` or more only the least
    likely stays, and what equals it.

    "Exclude top choices": P. E. Weidmann, text-generation-webui, pull request 6335, 2024. Where
    fewer than two reach the threshold nothing is changed. Whether it happens at a position follows
    from the request's key, as its tokens do.
    """

    def fields(self, sizes: Sizes) -> Mapping[str, RowField]:
        """The options."""
        return option_fields(XtcOptions)

    def row(self, options: Any, facts: RowFacts) -> Mapping[str, Any]:
        """Any options can be served."""
        return option_values(options)

    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        """f32 [S, vocab]."""
        given = distribution(logits, state)
        top = jnp.exp(given.log_p) >= processor_state["threshold"][:, None]
        top = top & jnp.isfinite(logits)
        least = jnp.where(top, logits, jnp.inf).min(axis=-1, keepdims=True)
        # A key's words are random bits themselves: the last step of deriving it was a draw of them.
        bits = jax.random.key_data(position_keys(state, XTC_STREAM))[:, :1]
        happens = (bits >> 8).astype(jnp.int32).astype(jnp.float32) * 2.0**-24 < processor_state[
            "probability"
        ][:, None]
        return keep(logits, ~happens | ~top | (logits == least), given)
