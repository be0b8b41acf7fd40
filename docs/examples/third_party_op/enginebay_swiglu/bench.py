"""The benchmark of the op swiglu: its ideal cost, and the MLP of each shape of `bench kernels`."""

from __future__ import annotations

from typing import Any

from enginebay_bench.cost import Cost
from enginebay_bench.problem import BenchSetting, OpBench, Problem, call_problem, noise
from enginebay_bench.shapes import BATCHES, CONTEXTS, Axes, Shape
from enginebay_swiglu.op import SWIGLU
from enginebay_testing.exact import OpCall


def cost(x: Any, gate: Any, up: Any) -> Cost:
    """Return the cost of two products, each reading its weight once."""
    (rows, inputs), outputs, item = x.shape, gate.shape[0], x.dtype.itemsize
    return Cost(
        flops=4.0 * rows * inputs * outputs,
        bytes_read=(2.0 * inputs * outputs + rows * inputs) * item,
        bytes_written=1.0 * rows * outputs * item,
    )


def problems(shape: Shape, setting: BenchSetting) -> list[Problem]:
    """Return one problem: the step's tokens through the MLP of the shape's layer."""
    layer = shape.layer
    sizes = ((shape.num_tokens(), layer.hidden), *[(layer.mlp, layer.hidden)] * 2)
    arrays = (noise(size, setting.dtype, setting.seed, i) for i, size in enumerate(sizes))
    return [call_problem(SWIGLU, shape, OpCall(tuple(arrays)))]


BENCH = OpBench(Axes(BATCHES, {"decode": (0,), "prefill": CONTEXTS, "mixed": (0,)}), problems)
