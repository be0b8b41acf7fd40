"""Every registered part keeps the contract of its kind: a new plugin is tested by existing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from enginebay.registry import load_registry
from enginebay.testing.suites import EVERYTHING, label, part_checks, select

SHARES_STATE = ("engine", "model")
"""Kinds whose checks share weights and compiled programs: all of a part in one process."""

ENGINES_IN_SHORT = ("declaration", "greedy", "nothing_compiles", "released", "penalised", "ledger")
"""Of an engine's checks, by a part of their names, those that `make test` runs; the others compile a lot, and are slow."""
OTHER_OPTIONS = "engine:esurge"
OPTIONS_IN_SHORT = ("declaration", "released", "ledger")
"""The same of an engine that is another one with other options."""
"""There is no slow part of it: the engine is engine:oengine, which runs all of them."""
ORACLE = "engine:vinference"
SLOW_OF_THE_ORACLE = ("chunk_sizes", "decode_steps", "state_moves", "alone_equals_batch", "come_back_warm")
"""The oracle of the engines runs all but these, which make several engines each or repeat what unit tests say of it."""


def marks_of(part: str, kind: str, name: str) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.xdist_group(part)] if kind in SHARES_STATE else []
    if kind == "engine":
        if part == ORACLE:
            slow = any(word in name for word in SLOW_OF_THE_ORACLE)
        else:
            slow = not any(word in name for word in ENGINES_IN_SHORT)
        marks += [pytest.mark.slow] if slow else []
    return marks


def is_left_out(part: str, name: str) -> bool:
    """Said by another part that runs the same code."""
    return part == OTHER_OPTIONS and not any(word in name for word in OPTIONS_IN_SHORT)


def registered_checks() -> Iterator[pytest.ParameterSet]:
    registry = load_registry()
    for entry in select(registry, EVERYTHING):
        part = label(entry)
        for name, check in part_checks(registry, entry):
            if is_left_out(part, name):
                continue
            yield pytest.param(check, id=f"{part}-{name}", marks=marks_of(part, entry.kind, name))


@pytest.mark.parametrize("check", list(registered_checks()))
def test_registered_part_keeps_its_contract(check: Callable[[], None]) -> None:
    check()
