"""The op lora as a benchmark: 8 adapters of rank 16 on the widest layer of each shape."""

from __future__ import annotations

import numpy as np

from enginebay_bench.problem import BenchSetting, OpBench, Problem, call_problem, noise
from enginebay_bench.shapes import BATCHES, CONTEXTS, Axes, Shape
from enginebay_lora.ops import LORA
from enginebay_testing.exact import OpCall

SLOTS, RANK = 8, 16


def lora_problems(shape: Shape, setting: BenchSetting) -> list[Problem]:
    """Return one problem: each row of the step has one of the adapters, or none."""
    tokens, hidden, mlp = shape.num_tokens(), shape.layer.hidden, shape.layer.mlp
    sizes = ((tokens, mlp), (tokens, hidden), (SLOTS, 1, RANK, hidden), (SLOTS, RANK, mlp))
    arrays = [noise(size, setting.dtype, setting.seed, i) for i, size in enumerate(sizes)]
    rows = np.arange(tokens) * shape.batch // tokens
    places = (rows % (SLOTS + 1)).astype(np.int32)
    return [call_problem(LORA, shape, OpCall((*arrays, places)))]


LORA_BENCH = OpBench(
    Axes(BATCHES, {"decode": (0,), "prefill": CONTEXTS, "mixed": (0,)}), lora_problems
)
