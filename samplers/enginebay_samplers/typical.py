"""The processor typical: keeps tokens whose surprise is near the entropy of the distribution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

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
from enginebay.ops.sampling import INF_BITS, least_that_holds
from enginebay.row_value import RowValue
from enginebay_samplers.distribution import distribution, keep


class TypicalOptions(BaseModel):
    """Options of the processor typical."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [{"typical_p": 0.2}, {"typical_p": 0.7}, {"typical_p": 1.0}]
        },
    )

    typical_p: Annotated[float, RowValue("float32")] = Field(
        default=0.95,
        gt=0.0,
        le=1.0,
        description="keep the most typical tokens with this mass; 1 keeps all",
    )


class Typical(LogitsProcessor):
    """Keeps the tokens whose -log p is nearest to the entropy, until their mass is typical_p.

    Tokens at the same distance as the last one are kept too. Meister, Pimentel, Wiher and
    Cotterell, "Locally typical sampling", 2022. The border is found by bisection over the bits of
    the distance, with 31 masked sums. The most likely token may be removed.
    """

    def fields(self, sizes: Sizes) -> Mapping[str, RowField]:
        """Return the field typical_p."""
        return option_fields(TypicalOptions)

    def row(self, options: Any, facts: RowFacts) -> Mapping[str, Any]:
        """Return the value of a row; every value is allowed."""
        return option_values(options)

    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        """Return the changed logits, f32 [S, vocab]."""
        given = distribution(logits, state)
        p = jnp.exp(given.log_p)
        possible = p > 0.0
        entropy = -jnp.where(possible, p * given.log_p, 0.0).sum(axis=-1, keepdims=True)
        distance = lax.bitcast_convert_type(jnp.abs(given.log_p + entropy), jnp.int32)
        # Computed once: another fusion could round differently, and no token would be within the
        # border that was found.
        p, distance = lax.optimization_barrier((p, distance))
        mass = processor_state["typical_p"][:, None]
        wanted = jnp.where(given.is_drawn, jnp.maximum(mass, jnp.finfo(jnp.float32).tiny), 0.0)

        def has_mass(limit: jax.Array) -> jax.Array:
            return jnp.where(distance <= limit, p, 0.0).sum(axis=-1, keepdims=True) >= wanted

        low = jnp.zeros(wanted.shape, jnp.int32)
        border = least_that_holds(has_mass, low, jnp.full_like(low, INF_BITS))
        return keep(logits, (distance <= border) | (mass >= 1.0), given)
