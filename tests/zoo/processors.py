"""Faulty logits processors: they depend on other rows, read or keep what they do not declare, or
make scores that nothing can be drawn from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from pydantic import BaseModel, ConfigDict

from enginebay.contracts.processor import LogitsProcessor, ProcessorState, RowFacts, RowField, Sizes
from enginebay.contracts.sampler import SamplingState
from enginebay_testing.processors import processor_checks
from enginebay_testing.verdicts import Check


class Options(BaseModel):
    """How many of the first tokens lose how much, or all."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    first: int = 8
    cost: float = 0.5


class Right(LogitsProcessor):
    """The first tokens lose what they cost."""

    def fields(self, sizes: Sizes) -> Mapping[str, RowField]:
        return {"first": RowField("int32"), "cost": RowField("float32")}

    def row(self, options: Any, facts: RowFacts) -> Mapping[str, Any]:
        return {"first": options.first, "cost": options.cost}

    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        return jnp.where(
            first(logits, processor_state), logits - processor_state["cost"][:, None], logits
        )


def first(logits: jax.Array, processor_state: ProcessorState) -> jax.Array:
    return jnp.arange(logits.shape[1]) < processor_state["first"][:, None]


class Counting(Right):
    """Its cost grows with each token."""

    evolves = True

    def after(
        self,
        logits: jax.Array,
        tokens: jax.Array,
        processor_state: ProcessorState,
        state: SamplingState,
    ) -> ProcessorState:
        return {
            "cost": processor_state["cost"]
            + jnp.where(tokens < processor_state["first"], 0.25, 0.0)
        }


class ShapeByPrompt(Right):
    def row(self, options: Any, facts: RowFacts) -> Mapping[str, Any]:
        return {"first": facts.prompt_token_ids, "cost": options.cost}


class MissingField(Right):
    def row(self, options: Any, facts: RowFacts) -> Mapping[str, Any]:
        return {"first": options.first}


class TakesTheCoresName(Right):
    def fields(self, sizes: Sizes) -> Mapping[str, RowField]:
        return {"is_used": RowField("bool")}


class OtherDtype(Right):
    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        return logits.astype(jnp.bfloat16)


class Nothing(Right):
    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        return logits


class MeanOfTheBatch(Right):
    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        return logits - processor_state["cost"].sum() * jnp.where(
            first(logits, processor_state), 1.0, 0.0
        )


class CostOfTheFirstRow(Right):
    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        return jnp.where(
            first(logits, processor_state),
            logits - processor_state["cost"][0] * (state.positions % 3)[0],
            logits,
        )


class Infinite(Right):
    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        return jnp.where(
            first(logits, processor_state), logits - logits.max(axis=-1, keepdims=True), logits
        )


class BansAll(Right):
    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        return jnp.where(first(logits, processor_state), -jnp.inf, logits)


class BringsBack(Right):
    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        return jnp.maximum(logits, -1e4)


class DeclaresArgmax(Right):
    keeps_argmax = True


class LosesTheLastToken(Right):
    keeps_argmax = True

    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        return logits.at[:, -1].set(-jnp.inf)


class ReadsInSecret(Right):
    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        row = jnp.arange(logits.shape[0])
        return logits.at[row, state.token_ids[row, jnp.maximum(state.positions - 1, 0)]].add(-1.0)


class ReadsTheFuture(Right):
    reads_tokens = True

    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        row = jnp.arange(logits.shape[0])
        return logits.at[row, state.token_ids[row, state.positions]].add(-1.0)


class EvolvesInSecret(Counting):
    evolves = False


class EvolvesNever(Counting):
    def after(
        self,
        logits: jax.Array,
        tokens: jax.Array,
        processor_state: ProcessorState,
        state: SamplingState,
    ) -> ProcessorState:
        return {}


class EvolvesTogether(Counting):
    def after(
        self,
        logits: jax.Array,
        tokens: jax.Array,
        processor_state: ProcessorState,
        state: SamplingState,
    ) -> ProcessorState:
        return {"cost": processor_state["cost"] + jnp.arange(tokens.size)}


class EvolvesOutOfBounds(Counting):
    def after(
        self,
        logits: jax.Array,
        tokens: jax.Array,
        processor_state: ProcessorState,
        state: SamplingState,
    ) -> ProcessorState:
        return {"cost": processor_state["cost"] / (tokens - tokens)}


def examples() -> list[Options]:
    return [Options(), Options(first=75, cost=2.0)]


FAULTS: dict[str, Any] = {
    "a function": Right.row,
    **{
        kind.__name__: kind
        for kind in (
            *(TakesTheCoresName, ShapeByPrompt, MissingField, OtherDtype, Nothing, MeanOfTheBatch),
            *(CostOfTheFirstRow, Infinite, BansAll, BringsBack, DeclaresArgmax, ReadsInSecret),
            LosesTheLastToken,
            *(ReadsTheFuture, EvolvesInSecret, EvolvesNever, EvolvesTogether, EvolvesOutOfBounds),
        )
    },
}

RIGHT: dict[str, type[LogitsProcessor]] = {"Right": Right, "Counting": Counting}


def checks(part: Any) -> list[Check]:
    """The kit's suite."""
    return processor_checks(part, examples)
