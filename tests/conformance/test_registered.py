"""Every registered part keeps the contract of its kind: a new plugin is tested by existing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from enginebay.registry import load_registry
from enginebay.testing.suites import EVERYTHING, label, part_checks, select

SHARES_STATE = ("engine", "model")
"""Kinds whose checks share weights and compiled programs: all of a part in one process."""

ENGINES_IN_SHORT = ("greedy", "nothing_compiles", "released", "penalised", "ledger")
"""Of an engine's checks, by a part of their names, those that `make test` runs; the others compile a lot, and are slow.
The oracle of the engines runs all of them."""
OTHER_OPTIONS = "engine:esurge"
OPTIONS_IN_SHORT = ("released", "ledger")
"""The same of an engine that is another one with other options."""
ORACLE = "engine:vinference"


def marks_of(part: str, kind: str, name: str) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.xdist_group(part)] if kind in SHARES_STATE else []
    in_short = OPTIONS_IN_SHORT if part == OTHER_OPTIONS else ENGINES_IN_SHORT
    if kind == "engine" and part != ORACLE and not any(word in name for word in in_short):
        marks.append(pytest.mark.slow)
    return marks


def registered_checks() -> Iterator[pytest.ParameterSet]:
    registry = load_registry()
    for entry in select(registry, EVERYTHING):
        part = label(entry)
        for name, check in part_checks(registry, entry):
            yield pytest.param(check, id=f"{part}-{name}", marks=marks_of(part, entry.kind, name))


@pytest.mark.parametrize("check", list(registered_checks()))
def test_registered_part_keeps_its_contract(check: Callable[[], None]) -> None:
    check()
