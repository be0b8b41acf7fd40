"""Layout and kernels pass enginebay's conformance suites, within the layout's tolerance."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from enginebay_third_party_layout.plugin import LAYOUT

from enginebay.plugins.registry import load_registry
from enginebay_testing.engine_moves import put_restores_the_bytes
from enginebay_testing.subject import EngineSubject
from enginebay_testing.suites import part_checks, select
from enginebay_testing.tiny import write_tiny_checkpoint

EACH = 4
"""Every fourth case of a kernel; `enginebay check kernel:attention:int8_scan` runs all cases."""

PARTS = ("layout:int8_heads", "kernel:attention:int8_scan", "kernel:kv_write:int8_heads")


def registered() -> list[pytest.ParameterSet]:
    """Return the checks of the plugin's parts. `pytest -p enginebay_testing --enginebay-check
    NAME` runs the same checks, and all cases of the kernels.
    """
    registry = load_registry()
    entries = [entry for name in PARTS for entry in select(registry, name)]
    return [
        pytest.param(check, id=f"{e.name}-{name}")
        for e in entries
        for name, check in part_checks(registry, e)[:: EACH if e.kind == "kernel" else 1]
    ]


@pytest.mark.parametrize("check", registered())
def test_registered_part_keeps_its_contract(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize("engine", ["oengine", "vinference"])
def test_a_row_that_is_put_after_take_has_the_same_bytes(engine: str, tmp_path: Path) -> None:
    """The suite of engines checks this for every installed quantised layout."""
    model = str(write_tiny_checkpoint(tmp_path, load_registry()))
    put_restores_the_bytes(EngineSubject(engine, model), LAYOUT)
