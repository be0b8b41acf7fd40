"""The engine passes enginebay's conformance suite of engines."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from enginebay.plugins.registry import load_registry
from enginebay_testing.suites import part_checks, select

REGISTRY = load_registry()
(ENGINE,) = select(REGISTRY, "engine:ring")
CHECKS = [pytest.param(check, id=name) for name, check in part_checks(REGISTRY, ENGINE)]


@pytest.mark.parametrize("check", CHECKS)
def test_engine_keeps_its_contract(check: Callable[[], None]) -> None:
    check()
