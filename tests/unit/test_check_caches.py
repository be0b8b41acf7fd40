"""`enginebay check engine:NAME` runs the suite of ledgers on an engine's example, or says why it
cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from enginebay.plugins.hooks import Declaration
from enginebay_testing.cases import part_cases
from enginebay_testing.engines import engine_checks
from enginebay_testing.ledgers import LedgerExample
from enginebay_testing.subject import EngineSubject
from enginebay_testing.verdicts import judge
from tests.unit.test_compose import with_parts
from tests.zoo import caches

TARGET = "enginebay_paged.engine:make_engine"


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


def verdicts(example: Callable[[], Any]) -> dict[str, tuple[str, str]]:
    """(verdict, detail) of each case of the ledger but the one of any sequence of calls, which
    takes seconds, and of the declaration.
    """
    said = {"ledger_example": f"{__name__}:{example.__name__}"}
    registry = with_parts(Declaration("engine", "mine", TARGET, capabilities=said))
    of_engines = {name for name, _ in engine_checks(EngineSubject("mine"))}
    found: dict[str, tuple[str, str]] = {}
    for case in part_cases(registry, registry.find("engine", "mine")):
        if case.name not in {*of_engines, "any_sequence_keeps_the_ledger_consistent"}:
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
        (wrong_type, "INCORRECT", "returns tuple, not a LedgerExample"),
        (failing, "ERROR", "no page is free"),
    ],
)
def test_a_cache_that_cannot_be_made_says_why(
    example: Callable[[], Any], verdict: str, text: str
) -> None:
    found = verdicts(example)
    assert set(found) == {"declaration_holds", "ledger_example"}
    assert found["ledger_example"][0] == verdict
    assert text in found["ledger_example"][1]
