"""Both parts pass enginebay's conformance suites, with default options and with other options."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from enginebay_third_party.shortest_prompt_first import (
    ShortestPromptFirst,
    ShortestPromptFirstOptions,
)

from enginebay.plugins.registry import load_registry
from enginebay_testing.schedulers import scheduler_checks
from enginebay_testing.suites import part_checks, select

PARTS = ("scheduler:shortest_prompt_first", "kernel:attention:chunked_scan")


def registered() -> list[pytest.ParameterSet]:
    """Return the checks of the plugin's parts. `pytest -p enginebay_testing --enginebay-check
    NAME` runs the same checks.
    """
    registry = load_registry()
    entries = [entry for name in PARTS for entry in select(registry, name)]
    return [
        pytest.param(check, id=f"{e.name}-{name}")
        for e in entries
        for name, check in part_checks(registry, e)
    ]


@pytest.mark.parametrize("check", registered())
def test_registered_part_keeps_its_contract(check: Callable[[], None]) -> None:
    check()


IMPATIENT = scheduler_checks(
    lambda: ShortestPromptFirst(ShortestPromptFirstOptions(tokens_per_s=1e4))
)


@pytest.mark.parametrize("check", [pytest.param(check, id=name) for name, check in IMPATIENT])
def test_scheduler_keeps_the_contract_with_other_options(check: Callable[[], None]) -> None:
    check()
