"""Every registered part keeps the contract of its kind: a new plugin is tested by existing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from enginebay.registry import load_registry
from enginebay.testing.suites import EVERYTHING, label, part_checks, select

SHARES_STATE = ("engine", "model", "sampler")
"""Kinds whose checks share weights and compiled programs: all of a part in one process."""

SEVERAL_ENGINES = ("chunk_sizes", "decode_steps", "state_moves")
"""Of an engine's checks, by a part of their names, those that make engines of their own and compile a lot: they are slow."""
ORACLE = "engine:vinference"
SLOW_BUT_OF_THE_ORACLE = ("logprobs", "compiling_can_be")
"""The same of engines that are not the oracle of the others: what the core does for all of them."""
OTHER_OPTIONS = "engine:esurge"
OPTIONS_IN_SHORT = ("declaration", "ledger")
"""The same of an engine that is engine:oengine with other options: what depends on the size of its pages."""
OPTIONS_AT_ALL = (*OPTIONS_IN_SHORT, "released")
"""And with those that are slow. The others run on engine:oengine alone, which is the same code."""


def marks_of(part: str, kind: str, name: str) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.xdist_group(part)] if kind in SHARES_STATE else []
    if kind == "engine":
        if part == OTHER_OPTIONS:
            slow = not any(word in name for word in OPTIONS_IN_SHORT)
        else:
            costly = SEVERAL_ENGINES if part == ORACLE else SEVERAL_ENGINES + SLOW_BUT_OF_THE_ORACLE
            slow = any(word in name for word in costly)
        marks += [pytest.mark.slow] if slow else []
    return marks


def is_left_out(part: str, name: str) -> bool:
    """Said by another part that runs the same code."""
    return part == OTHER_OPTIONS and not any(word in name for word in OPTIONS_AT_ALL)


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
