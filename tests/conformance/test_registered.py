"""Every registered part keeps the contract of its kind: a new plugin is tested by existing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from enginebay.registry import load_registry
from enginebay.testing.suites import EVERYTHING, label, part_checks, select

SHARES_STATE = ("engine", "model")
"""Kinds whose checks share weights and compiled programs: all of a part in one process."""


def registered_checks() -> Iterator[pytest.ParameterSet]:
    registry = load_registry()
    for entry in select(registry, EVERYTHING):
        part = label(entry)
        marks = [pytest.mark.xdist_group(part)] if entry.kind in SHARES_STATE else []
        for name, check in part_checks(registry, entry):
            yield pytest.param(check, id=f"{part}-{name}", marks=marks)


@pytest.mark.parametrize("check", list(registered_checks()))
def test_registered_part_keeps_its_contract(check: Callable[[], None]) -> None:
    check()
