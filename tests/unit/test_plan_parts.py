"""Parts that take part in every plan: revisions, and what knows tuned configurations; and
what is said where there is none.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from enginebay.compose.composition import make_plan
from enginebay.compose.negotiate import choose_tuning
from enginebay.compose.plan import Plan
from enginebay.config import EngineConfig, Reason
from enginebay.errors import PluginError, UnsupportedError
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


def with_note(plan: Plan) -> Plan:
    note = Reason("note", plan.config.engine.name, "a stranger's revision")
    return dataclasses.replace(plan, reasons=(*plan.reasons, note))


def failing(given: Any) -> Any:
    raise ValueError("by intention")


def test_a_revision_sees_the_settled_plan_and_has_the_last_word() -> None:
    plan = make_plan(CONFIG, registry(entry("revision", "note", "with_note")))
    assert plan.reasons[-1] == Reason("note", plan.config.engine.name, "a stranger's revision")
    assert plan.config.engine.name != "auto"


def test_a_part_that_fails_is_named_with_its_plugin() -> None:
    with pytest.raises(PluginError, match="revision 'bad' of plugin 'stranger': ValueError"):
        make_plan(CONFIG, registry(entry("revision", "bad", "failing")))


def test_what_is_chosen_by_name_is_refused_where_no_part_serves_it() -> None:
    none = Registry([])
    with pytest.raises(UnsupportedError, match="no plugin has tuned configurations"):
        choose_tuning(none, EngineConfig(tuned="require"))
    assert isinstance(choose_tuning(none, EngineConfig()), Untuned)
    shadowed = EngineConfig(**{**CONFIG.model_dump(), "shadow": {"attention": "xla"}})
    with pytest.raises(UnsupportedError, match="shadow, but no plugin supports it"):
        make_plan(shadowed, registry(without=("revision",)))
