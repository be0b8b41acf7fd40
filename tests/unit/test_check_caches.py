"""`enginebay check cache:NAME` runs the suite of ledgers, or says why it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from enginebay.hooks import Declaration
from enginebay_testing.cases import part_cases
from enginebay_testing.ledgers import LedgerExample
from enginebay_testing.verdicts import judge
from tests.unit.test_compose import with_parts
from tests.zoo import caches

TARGET = "enginebay_oengine.ledger:PageLedger"


def right() -> LedgerExample:
    make = caches.make(caches.PageLedger)
    return LedgerExample(make, caches.NUM_ROWS, caches.MAX_TOKENS, caches.PAGE_SIZE)


def lenient() -> LedgerExample:
    make = caches.make(caches.Lenient)
    return LedgerExample(make, caches.NUM_ROWS, caches.MAX_TOKENS, caches.PAGE_SIZE)


def wrong_type() -> tuple[int, int]:
    return caches.NUM_ROWS, caches.MAX_TOKENS


def failing() -> LedgerExample:
    raise ValueError("no page is free")


def verdicts(example: Callable[[], Any] | None) -> dict[str, tuple[str, str]]:
    """(verdict, detail) of each case but the one of any sequence of calls, which takes seconds."""
    said = {} if example is None else {"example": f"{__name__}:{example.__name__}"}
    registry = with_parts(Declaration("cache", "mine", TARGET, capabilities=said))
    found: dict[str, tuple[str, str]] = {}
    for case in part_cases(registry, registry.find("cache", "mine")):
        if case.name != "any_sequence_keeps_the_books":
            outcome = judge(case.run)
            found[case.name] = (outcome.verdict, outcome.detail)
    return found


def test_a_cache_with_an_example_is_held_to_the_suite_of_ledgers() -> None:
    found = verdicts(right)
    assert len(found) == 9
    assert {verdict for verdict, _ in found.values()} == {"PASS"}
    failed = {name for name, (verdict, _) in verdicts(lenient).items() if verdict != "PASS"}
    assert failed == {"releasing_twice_is_refused"}


@pytest.mark.parametrize(
    ("example", "verdict", "text"),
    [
        (None, "UNSUPPORTED", "`enginebay check engine:NAME --all`"),
        (wrong_type, "INCORRECT", "returns tuple, not a LedgerExample"),
        (failing, "ERROR", "no page is free"),
    ],
)
def test_a_cache_that_cannot_be_made_says_why(
    example: Callable[[], Any] | None, verdict: str, text: str
) -> None:
    found = verdicts(example)
    assert set(found) == {"declaration_holds", "example"}
    assert found["example"][0] == verdict
    assert text in found["example"][1]
