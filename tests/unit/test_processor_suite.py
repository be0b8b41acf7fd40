"""The processors' conformance suite catches wrong processors, and lets a right one pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from enginebay.contracts.processor import LogitsProcessor, RowFacts
from enginebay_testing.processors import processor_checks
from tests.zoo.processors import (
    BansAll,
    BringsBack,
    CostOfTheFirstRow,
    Counting,
    DeclaresArgmax,
    EvolvesInSecret,
    EvolvesNever,
    EvolvesOutOfBounds,
    EvolvesTogether,
    Infinite,
    LosesTheLastToken,
    MeanOfTheBatch,
    MissingField,
    Nothing,
    OtherDtype,
    ReadsInSecret,
    ReadsTheFuture,
    Right,
    ShapeByPrompt,
    TakesTheCoresName,
    examples,
)


@pytest.mark.parametrize("right", [Right, Counting])
def test_right_ones_pass(right: type[LogitsProcessor]) -> None:
    for _, check in processor_checks(right, examples):
        check()


@pytest.mark.parametrize(
    ("wrong", "name", "told"),
    [
        (Right.row, "is_a_logits_processor", "not a subclass of"),
        (TakesTheCoresName, "fields_are_as_declared", "is_used is reserved for the core"),
        (OtherDtype, "result_has_the_logits_shape", "bfloat16"),
        (Nothing, "examples_change_scores", "no score changes"),
        (MeanOfTheBatch, "rows_do_not_depend_on_the_batch", "alone against all"),
        (CostOfTheFirstRow, "rows_do_not_depend_on_the_batch", "alone against all"),
        (MeanOfTheBatch, "rows_that_do_not_use_it_keep_their_logits", "beside rows"),
        (Infinite, "scores_are_finite_or_minus_infinity", "has the score nan"),
        (BansAll, "some_token_stays_possible", "every token impossible"),
        (BringsBack, "impossible_tokens_stay_impossible", "was -inf"),
        (DeclaresArgmax, "argmax_is_kept_as_declared", "keeps_argmax is declared"),
        (LosesTheLastToken, "argmax_is_kept_as_declared", "best token changes from 74"),
        (ReadsInSecret, "tokens_are_read_as_declared", "not declared"),
        (ReadsTheFuture, "tokens_are_read_as_declared", "after its position"),
        (EvolvesInSecret, "fields_evolve_as_declared", "only called if"),
        (EvolvesNever, "fields_evolve_as_declared", "no field changes"),
        (EvolvesTogether, "fields_evolve_as_declared", "in another order"),
        (EvolvesOutOfBounds, "fields_evolve_as_declared", "holds NaN or infinity"),
    ],
)
def test_suite_finds_a_wrong_one(wrong: Any, name: str, told: str) -> None:
    check = dict(processor_checks(wrong, examples))[name]
    with pytest.raises(AssertionError, match=told):
        check()


class MoreFields(Right):
    """A field more than it declares."""

    def row(self, options: Any, facts: RowFacts) -> Mapping[str, Any]:
        return {**super().row(options, facts), "second": 0}


@pytest.mark.parametrize("wrong", [ShapeByPrompt, MissingField, MoreFields])
def test_rows_with_other_fields_than_declared_are_refused_with_their_names(
    wrong: type[LogitsProcessor],
) -> None:
    check = dict(processor_checks(wrong, examples))["fields_are_as_declared"]
    with pytest.raises(TypeError, match="first"):
        check()
