"""The problems of an op on a shape: those of its benchmark, or a captured call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from enginebay.ops.op import Op
from enginebay_bench.attention import traced_problem
from enginebay_bench.problem import BenchSetting, Problem, bench_of, call_problem
from enginebay_bench.shapes import Shape
from enginebay_runtime.call_trace import TracedCall
from enginebay_testing.traced_cases import TracedShape, op_call, why_not_repeated


def problems_of(op: Op[Any], shape: Shape | TracedShape, setting: BenchSetting) -> list[Problem]:
    """Return the problems of an op on a shape, each with another one of the next seed. A captured
    call is one problem.
    """
    others = dataclasses.replace(setting, seed=setting.seed + 1)
    if isinstance(shape, TracedShape):
        pairs: Iterable[Sequence[Problem]] = (
            [_traced_problem(op, shape, each)] for each in (setting, others)
        )
    else:
        pairs = (bench_of(op).problems(shape, each) for each in (setting, others))
    return [dataclasses.replace(p, other=o) for p, o in zip(*pairs, strict=True)]


def _traced_problem(op: Op[Any], shape: TracedShape, setting: BenchSetting) -> Problem:
    if isinstance(shape.call, TracedCall):
        problem = call_problem(op, shape, op_call(shape.call, setting.seed))
        reason = why_not_repeated(shape.call)
        return problem if reason is None else dataclasses.replace(problem, why_not=lambda _: reason)
    return traced_problem(shape, setting)
