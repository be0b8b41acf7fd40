"""The record of the op swiglu: its signature, and the facts that hold for all its kernels."""

from __future__ import annotations

from typing import Protocol

import jax

from enginebay.ops.op import Op


class SwigluOp(Protocol):
    """x [T, in], gate and up [out, in] -> silu(x gate^T) * (x up^T) [T, out].

    Both products are summed in f32. The products, the activation and the result have x's dtype.
    """

    def __call__(self, x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array: ...


SWIGLU: Op[SwigluOp] = Op(
    "swiglu",
    SwigluOp,
    reference="enginebay_swiglu.plain:swiglu",
    quick_cases="enginebay_swiglu.kit:quick_cases",
    tolerance={"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3},
    oracle="enginebay_swiglu.kit:exact",
    cost="enginebay_swiglu.bench:cost",
    kit="enginebay_swiglu.kit:KIT",
    bench="enginebay_swiglu.bench:BENCH",
)
