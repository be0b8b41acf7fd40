"""The checks of swiglu kernels: the quick cases, the float64 reference, the constructed cases, and
the programs that are compiled for devices that are not present.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.compose.quick_cases import CheckSetting, QuickCase
from enginebay.ops.caps import Env
from enginebay_swiglu.op import SWIGLU
from enginebay_testing.covering import DTYPES, OpAxes
from enginebay_testing.exact import OpCall, within_tolerance
from enginebay_testing.op_kit import LayoutTypes, OpKit, OpProgram, PlainCase, covering_cases


def exact(x: np.ndarray, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Compute the op in float64."""
    opened, product = (x.astype(np.float64) @ w.astype(np.float64).T for w in (gate, up))
    return opened / (1.0 + np.exp(-opened)) * product


def quick_cases(setting: CheckSetting) -> Iterator[QuickCase]:
    """Yield one call, for a kernel that is given as a function or an import path."""
    rng = np.random.default_rng(0)
    shapes = ((5, 24), (64, 24), (64, 24))
    inputs = tuple(rng.normal(size=shape).astype(jnp.dtype(setting.dtype)) for shape in shapes)
    yield QuickCase("swiglu of 5", lambda impl, *arrays: {"out": impl(*arrays)}, inputs)


AXES = OpAxes(
    "swiglu",
    {
        "dtype": DTYPES,
        "rows": (3, 1, 17),
        "inputs": (40, 129),
        "outputs": (128, 96, 30),
        "data": ("plain", "outlier", "negative"),
        "config": ("default", "small", "large"),
    },
)


def call_of(case: PlainCase) -> OpCall:
    """Return the arrays of a case. With "negative" every gate is negative: the result is near 0."""
    rng = case.rng()
    rows, inputs, outputs = (case.int(axis) for axis in ("rows", "inputs", "outputs"))
    x = rng.normal(size=(rows, inputs))
    gate, up = rng.normal(size=(2, outputs, inputs)) / np.sqrt(inputs)
    if case.row["data"] == "outlier":
        x[:, 0] = 30.0
    elif case.row["data"] == "negative":
        x, gate = np.abs(x), -np.abs(gate)
    return OpCall(tuple(array.astype(case.dtype) for array in (x, gate, up)))


def programs(kernel: Any, env: Env, number: int, layouts: LayoutTypes) -> Iterator[OpProgram]:
    """Yield the MLP of a model with 8 billion weights, for a decode step and for a prefill."""
    weight = jax.ShapeDtypeStruct((14336, 4096), jnp.bfloat16)
    for rows in (32, 512):
        x = jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16)
        yield OpProgram(f"swiglu_{rows}", kernel, (x, weight, weight), representative=rows == 32)


KIT = OpKit(covering_cases(AXES, within_tolerance(SWIGLU, call_of)), programs)
