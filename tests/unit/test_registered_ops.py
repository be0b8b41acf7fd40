"""Ops that a plugin brings: chosen, named, given by hand and left out as the built-in ones are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
import pytest

from enginebay import compose
from enginebay.compose.binding import bound_ops
from enginebay.compose.composition import make_plan
from enginebay.compose.fused import COMPOSED
from enginebay.compose.ops import NONE
from enginebay.compose.override import overridden_plan
from enginebay.compose.plan import Plan
from enginebay.compose.quick_cases import CheckSetting, QuickCase
from enginebay.config import Reason, make_config
from enginebay.errors import IncorrectError, InputError, UnknownNameError, UnsupportedError
from enginebay.ops.bound import Ops
from enginebay.ops.norm import RmsNormOp
from enginebay.ops.op import Op
from enginebay.plugins.hooks import Declaration
from enginebay.plugins.registry import Entry, Registry, load_registry
from enginebay_xla.norm import rms_norm

HERE = "tests.unit.test_registered_ops"


class SwingOp(Protocol):
    """x of any shape -> -x."""

    def __call__(self, x: Any) -> Any: ...


class SwingNormOp(Protocol):
    """x [..., features] -> the norm of -x."""

    def __call__(self, x: Any, *, eps: float) -> Any: ...


CASES = f"{HERE}:swing_cases"
SWING: Op[SwingOp] = Op("swing", SwingOp, f"{HERE}:swing", CASES, {"float32": 1e-6})
SWING_NORM: Op[SwingNormOp] = Op(
    "swing_norm",
    SwingNormOp,
    f"{HERE}:swing_norm",
    CASES,
    {},
    made_of=("swing", "rms_norm"),
    composed=f"{HERE}:composed_swing_norm",
)
OF_NOTHING = Op("of_nothing", SwingOp, f"{HERE}:swing", CASES, {}, made_of=("swong",))
NUMBER = 7


def swing(x: Any) -> Any:
    return -x


def other_swing(x: Any) -> Any:
    return 0 - x


def wrong_swing(x: Any) -> Any:
    return x


def swing_norm(x: Any, *, eps: float) -> Any:
    return composed_swing_norm(swing, rms_norm)(x, eps=eps)


def composed_swing_norm(turn: SwingOp, norm: RmsNormOp) -> SwingNormOp:
    def swing_norm(x: Any, *, eps: float) -> Any:
        return norm(turn(x), jnp.ones(x.shape[-1], x.dtype), eps=eps)

    return swing_norm


def needs_more(x: Any, y: Any) -> Any:
    return x + y


def swing_cases(setting: CheckSetting) -> Iterator[QuickCase]:
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    yield QuickCase("swing of 3", lambda impl, x: {"out": impl(x)}, (x,))


def entry(kind: str, name: str, target: str, op: str = "", priority: int = 0) -> Entry:
    declared = Declaration(kind, name, target, op=op, capabilities={"priority": priority})
    return Entry(kind, name, "external", "1", "external", declaration=declared)


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
    assert bound_ops(plan.kernels, plan.placement)["swing"] is other_swing
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
        entry("kernel", "both", f"{HERE}:swing_norm", "swing_norm", 9),
    ]
    plan = plan_with(*SWINGS, *fused)
    assert plan.kernels.names["swing_norm"] == "both"
    assert plan_with(*SWINGS, *fused, swing="slow").kernels.names["swing_norm"] == COMPOSED
    given = overridden_plan(plan, {"swing": "slow"}, check=False)
    assert given.kernels.names["swing_norm"] == COMPOSED
    assert given.kernels.plain["swing"] is swing
    assert "swing_norm" not in given.kernels.plain
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    in_one, of_parts = (
        Ops(bound_ops(p.kernels, p.placement))[SWING_NORM](x, eps=1e-6) for p in (plan, given)
    )
    np.testing.assert_array_equal(in_one, of_parts)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (f"{HERE}:MISSING", "AttributeError"),
        (f"{HERE}:NUMBER", "op 'swing' of plugin 'external' is 7. Allowed: an Op of the same name"),
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
    there = Entry("kernel", "there", "external", "1", "external", declaration=declared)
    with pytest.raises(UnsupportedError, match="needs platform tpu, this is cpu"):
        plan_with(SWINGS[0], there, swing="there")


def test_an_op_without_an_implementation_is_an_error_when_a_model_calls_it() -> None:
    assert Ops({"swing": other_swing})[SWING] is other_swing
    with pytest.raises(UnsupportedError, match="the model calls op 'swing', which has no impl"):
        Ops({"rms_norm": rms_norm})[SWING]


def test_a_function_that_does_not_take_the_ops_arguments_is_refused_by_hand_and_by_path() -> None:
    message = r"missing a required argument: 'y'; calls are swing\(self, x: .*protocol .*SwingOp"
    with pytest.raises(InputError, match=message):
        overridden_plan(plan_with(*SWINGS), {"swing": needs_more}, check=False)
    with pytest.raises(InputError, match=message):
        plan_with(*SWINGS, swing=f"{HERE}:needs_more")
    with pytest.raises(InputError, match="of type int"):
        overridden_plan(plan_with(*SWINGS), {"swing": NUMBER}, check=False)


TYPED = """
import jax
from enginebay.ops.bound import Ops
from enginebay.ops.norm import RMS_NORM
from tests.unit.test_registered_ops import SWING, SWING_NORM

def model(ops: Ops, x: jax.Array) -> jax.Array:
    ops[SWING](x)
    ops[SWING_NORM](x, eps=1e-6)
    ops[SWING](x, 3)
    ops[SWING_NORM](x, epps=1e-6)
    return ops[RMS_NORM](x, x, eps="small")
"""


@pytest.mark.slow  # mypy reads the whole package
def test_a_type_checker_knows_the_signature_of_a_plugins_op(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo_root: Path
) -> None:
    api = pytest.importorskip("mypy.api")
    file = tmp_path / "typed.py"
    file.write_text(TYPED, encoding="utf-8")
    monkeypatch.chdir(repo_root)
    found, err, _ = api.run(
        ["--config-file", "pyproject.toml", "--cache-dir", str(tmp_path), str(file)]
    )
    assert err == ""
    wrong = [line for line in found.splitlines() if ": error: " in line and "typed.py" in line]
    assert [line.split(":")[1] for line in wrong] == ["10", "11", "12"], found
    for line, text in zip(wrong, ("Too many arguments", '"epps"', '"float"'), strict=True):
        assert text in line


def test_composition_names_no_op_but_attention() -> None:
    """What it needs to know of an op stands in the op's record or in a declaration. Attention is
    composed by phase with the layouts of the cache.
    """
    registered = set(load_registry().names("op")) - {"attention"}
    assert {"rope", "kv_write", "rope_kv_write", "sample", "linear"} <= registered
    found = set()
    for path in Path(compose.__file__).parent.glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        texts = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and id(node) not in texts:
                words = set(re.findall(r"\w+", str(node.value)))
                found |= {(path.name, name) for name in registered & words}
    assert not found
