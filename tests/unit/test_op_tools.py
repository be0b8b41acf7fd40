"""What tools make of an op whose record names none of their own: quick cases, the reference in
float64, and the bytes of a call.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from enginebay.errors import InputError
from enginebay.ops.caps import Env
from enginebay.plugins.registry import Registry
from enginebay_bench.cost import Cost
from enginebay_bench.problem import bench_of, call_problem, cost_of
from enginebay_bench.shapes import LAYERS, Shape
from enginebay_testing.exact import OpCall, errors, exact_results
from enginebay_testing.op_kit import CaseBudget, kit_of
from enginebay_testing.verdicts import judge
from enginebay_xla.layout import HndLayout
from tests.unit.test_registered_ops import NUMBER, SWING, SWINGS, swing, wrong_swing

X = np.linspace(0.0, 1.0, 6, dtype=np.float32).reshape(3, 2)
CALL = OpCall((X,))


def test_an_op_without_a_kit_is_checked_by_its_quick_cases() -> None:
    kit = kit_of(Registry(SWINGS), "swing")
    verdicts = {}
    for impl in (swing, wrong_swing, NUMBER):
        cases = kit.cases(impl, Env("cpu"), (HndLayout,), CaseBudget())
        verdicts[impl] = [judge(case.run).verdict for case in cases]
    assert verdicts[swing] == ["PASS", "PASS"]
    assert verdicts[wrong_swing] == ["INCORRECT", "INCORRECT"]
    assert verdicts[NUMBER][-1] == "INCORRECT"
    assert not list(kit.programs(swing, Env("cpu"), 0, ()))


def test_an_op_without_an_oracle_is_compared_with_its_reference_in_float64() -> None:
    (exact,) = exact_results(SWING, CALL)
    assert exact.dtype == np.float64
    np.testing.assert_array_equal(exact, -X.astype(np.float64))
    ((error, allowed),) = errors(SWING, CALL, -X)
    assert not error.any()
    np.testing.assert_allclose(allowed, 1e-6 * X.max(axis=1), rtol=1e-6)
    with pytest.raises(AssertionError, match=r"swing returns .*float64.*expected .*float32"):
        errors(SWING, CALL, -X.astype(np.float64))


def test_an_op_without_a_cost_reads_its_arguments_and_writes_its_results() -> None:
    assert cost_of(SWING, X) == Cost(0.0, X.nbytes, X.nbytes)


def test_a_call_is_a_problem_of_a_benchmark_that_finds_a_wrong_result() -> None:
    problem = call_problem(SWING, Shape(LAYERS["smollm2-135m"], "decode", 3, 0), CALL)
    inputs = problem.make(0.0)
    assert problem.check(inputs, swing(X), ()).is_right
    assert not problem.check(inputs, wrong_swing(X), ()).is_right
    assert not problem.check(inputs, X[:2], ()).is_right
    assert problem.bind(swing, None)((), *inputs.arrays)[0].shape == X.shape
    with pytest.raises(InputError, match="op 'swing' has no benchmark"):
        bench_of(dataclasses.replace(SWING, bench=None))
