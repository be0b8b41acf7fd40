"""The source of tuned configurations, and what is said where there is none."""

from __future__ import annotations

import pytest

from enginebay.compose.negotiate import choose_tuning
from enginebay.config import EngineConfig
from enginebay.errors import UnsupportedError
from enginebay.ops.tuning import Untuned
from enginebay.plugins.hooks import Declaration
from enginebay.plugins.registry import Entry, Registry, load_registry

HERE = "tests.unit.test_plan_parts"
CONFIG = EngineConfig(max_model_len=32, max_num_seqs=1, max_num_batched_tokens=16)


def entry(kind: str, name: str, target: str) -> Entry:
    declared = Declaration(kind, name, f"{HERE}:{target}")
    return Entry(kind, name, "stranger", "1", "stranger", declaration=declared)


def registry(*more: Entry, without: tuple[str, ...] = ()) -> Registry:
    kept = [e for e in load_registry().entries if e.kind not in without]
    return Registry([*kept, *more])


def test_what_is_chosen_by_name_is_refused_where_no_part_serves_it() -> None:
    none = Registry([])
    with pytest.raises(UnsupportedError, match="no plugin has tuned configurations"):
        choose_tuning(none, EngineConfig(tuned="require"))
    assert isinstance(choose_tuning(none, EngineConfig()), Untuned)
