"""Ops that a plugin brings: chosen, named, given by hand and left out as the built-in ones are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from enginebay.compose.composition import Plan, make_plan
from enginebay.compose.fused import COMPOSED
from enginebay.compose.ops import NONE
from enginebay.compose.override import overridden_plan
from enginebay.config import Reason, make_config
from enginebay.errors import IncorrectError, UnknownNameError, UnsupportedError
from enginebay.hooks import Declaration
from enginebay.ops.op import CheckSetting, Op, QuickCase
from enginebay.registry import Entry, Registry, load_registry

HERE = "tests.unit.test_registered_ops"
SWING = Op("swing", f"{HERE}:swing", f"{HERE}:swing_cases", {"float32": 1e-6})
SWING_NORM = Op(
    "swing_norm", f"{HERE}:swing", f"{HERE}:swing_cases", {}, made_of=("swing", "rms_norm")
)
OF_NOTHING = Op("of_nothing", f"{HERE}:swing", f"{HERE}:swing_cases", {}, made_of=("swong",))
NUMBER = 7


def swing(x: Any) -> Any:
    return -x


def other_swing(x: Any) -> Any:
    return 0 - x


def wrong_swing(x: Any) -> Any:
    return x


def swing_cases(setting: CheckSetting) -> Iterator[QuickCase]:
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    yield QuickCase("swing of 3", lambda impl, x: {"out": impl(x)}, (x,))


def entry(kind: str, name: str, target: str, op: str = "", priority: int = 0) -> Entry:
    declared = Declaration(kind, name, target, op=op, capabilities={"priority": priority})
    return Entry(kind, name, "stranger", "1", "stranger", declaration=declared)


SWINGS = [
    entry("op", "swing", f"{HERE}:SWING"),
    entry("kernel", "slow", f"{HERE}:swing", "swing"),
    entry("kernel", "fast", f"{HERE}:other_swing", "swing", 5),
]


def plan_with(*more: Entry, **kernels: str) -> Plan:
    base = {"compile_cache": "off", "platform": "cpu", "max_model_len": 64, "kernels": kernels}
    return make_plan(make_config(base), Registry([*load_registry().entries, *more]))


def reason_of(plan: Plan, op: str) -> Reason:
    return next(r for r in plan.reasons if r.setting == f"kernels.{op}")


def test_an_op_of_a_plugin_is_chosen_explained_and_bound_as_the_others_are() -> None:
    plan = plan_with(*SWINGS)
    assert reason_of(plan, "swing").chosen == "fast"
    assert reason_of(plan, "swing").refused == (("slow", "lower priority (0)"),)
    assert plan.kernels.bound()["swing"] is other_swing
    assert plan_with(*SWINGS, swing="slow").kernels.plain["swing"] is swing
    with pytest.raises(UnknownNameError, match="Did you mean 'slow'"):
        plan_with(*SWINGS, swing="slwo")


def test_an_implementation_by_hand_runs_the_ops_own_quick_cases() -> None:
    plan = plan_with(*SWINGS, swing=f"{HERE}:swing")
    assert reason_of(plan, "swing").why == "by import path, passed its quick check (1 case)"
    with pytest.raises(IncorrectError, match=r"swing of 3: out\[0\] is off by 2, allowed 1e-06"):
        overridden_plan(plan, {"swing": wrong_swing}, check=True)


def test_a_fused_op_of_a_plugin_is_taken_apart_where_a_part_is_given() -> None:
    fused = [
        entry("op", "swing_norm", f"{HERE}:SWING_NORM"),
        entry("kernel", "both", f"{HERE}:swing", "swing_norm", 9),
    ]
    plan = plan_with(*SWINGS, *fused)
    assert plan.kernels.names["swing_norm"] == "both"
    assert plan_with(*SWINGS, *fused, swing="slow").kernels.names["swing_norm"] == COMPOSED
    given = overridden_plan(plan, {"swing": "slow"}, check=False)
    assert given.kernels.names["swing_norm"] == COMPOSED
    assert given.kernels.plain["swing"] is swing
    assert "swing_norm" not in given.kernels.plain


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (f"{HERE}:MISSING", "AttributeError"),
        (f"{HERE}:NUMBER", "op 'swing' of plugin 'stranger' is 7. Allowed: an Op of the same name"),
        (f"{HERE}:SWING_NORM", "Allowed: an Op of the same name"),
        (f"{HERE}:SWING", "none is installed"),
    ],
)
def test_an_op_that_cannot_be_used_is_left_out_with_its_reason(target: str, why: str) -> None:
    plan = plan_with(entry("op", "swing", target))
    assert reason_of(plan, "swing").chosen == NONE
    assert why in reason_of(plan, "swing").why
    assert "swing" not in plan.kernels.plain


def test_an_op_made_of_an_unknown_one_is_left_out_with_the_nearest() -> None:
    plan = plan_with(*SWINGS, entry("op", "of_nothing", f"{HERE}:OF_NOTHING"))
    assert reason_of(plan, "of_nothing").chosen == NONE
    assert "unknown part of op of_nothing 'swong'" in reason_of(plan, "of_nothing").why
    assert "Did you mean 'swing'" in reason_of(plan, "of_nothing").why


def test_an_op_named_where_nothing_can_serve_it_is_an_error() -> None:
    declared = Declaration("kernel", "there", f"{HERE}:swing", op="swing", platforms=("tpu",))
    there = Entry("kernel", "there", "stranger", "1", "stranger", declaration=declared)
    with pytest.raises(UnsupportedError, match="needs platform tpu, this is cpu"):
        plan_with(SWINGS[0], there, swing="there")
