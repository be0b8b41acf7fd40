"""The processors' conformance suite catches wrong processors, and lets a right one pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from pydantic import BaseModel, ConfigDict

from enginebay.processor import LogitsProcessor, ProcessorState, RowFacts, RowField, Sizes
from enginebay.sampler import SamplingState
from enginebay_testing.processors import processor_checks


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


@pytest.mark.parametrize("right", [Right, Counting])
def test_right_ones_pass(right: type[LogitsProcessor]) -> None:
    for _, check in processor_checks(right, examples):
        check()


@pytest.mark.parametrize(
    ("wrong", "name", "told"),
    [
        (Right.row, "is_a_logits_processor", "no class of"),
        (TakesTheCoresName, "fields_are_as_declared", "is_used is the core's"),
        (OtherDtype, "result_has_the_logits_shape", "bfloat16"),
        (Nothing, "examples_change_scores", "no score changes"),
        (MeanOfTheBatch, "rows_do_not_depend_on_the_batch", "alone against all"),
        (CostOfTheFirstRow, "rows_do_not_depend_on_the_batch", "alone against all"),
        (MeanOfTheBatch, "rows_that_do_not_use_it_keep_their_logits", "beside rows"),
        (Infinite, "scores_are_finite_or_minus_infinity", "has the score nan"),
        (BansAll, "some_token_stays_possible", "no token is possible"),
        (BringsBack, "impossible_tokens_stay_impossible", "was impossible"),
        (DeclaresArgmax, "argmax_is_kept_as_declared", "keeps_argmax is declared"),
        (ReadsInSecret, "tokens_are_read_as_declared", "not declared"),
        (ReadsTheFuture, "tokens_are_read_as_declared", "past its position"),
        (EvolvesInSecret, "fields_evolve_as_declared", "nobody calls"),
        (EvolvesNever, "fields_evolve_as_declared", "no field changes"),
        (EvolvesTogether, "fields_evolve_as_declared", "in another order"),
        (EvolvesOutOfBounds, "fields_evolve_as_declared", "not finite"),
    ],
)
def test_suite_finds_a_wrong_one(wrong: Any, name: str, told: str) -> None:
    check = dict(processor_checks(wrong, examples))[name]
    with pytest.raises(AssertionError, match=told):
        check()


@pytest.mark.parametrize("wrong", [ShapeByPrompt, MissingField])
def test_rows_with_other_fields_than_declared_are_refused_with_their_names(
    wrong: type[LogitsProcessor],
) -> None:
    check = dict(processor_checks(wrong, examples))["fields_are_as_declared"]
    with pytest.raises(TypeError, match="first"):
        check()
