"""The built-in library of grammars and the guides of an engine keep their contracts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from enginebay.config import EngineConfig
from enginebay.text.guides.grammars import choose_grammars
from enginebay_testing.grammars import grammar_checks
from enginebay_testing.guides import guide_checks

CHOSEN = choose_grammars(EngineConfig())
MAKE: Any = CHOSEN.library
CHECKS = {
    **{f"grammar-{name}": check for name, check in grammar_checks(MAKE)},
    **{f"guide-{name}": check for name, check in guide_checks(CHOSEN, CHOSEN.limits)},
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_guided_decoding_keeps_its_contracts(check: Callable[[], None]) -> None:
    check()
