"""The ops rms_norm and add_rms_norm."""

from __future__ import annotations

from typing import Protocol

import jax

from enginebay.ops.op import CLOSE, Op


class RmsNormOp(Protocol):
    """Returns x [..., features] / rms(x) * weight [features] in x's dtype; statistics are f32."""

    def __call__(self, x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array: ...


class AddRmsNormOp(Protocol):
    """Returns (rms_norm(x + residual), x + residual), both [..., features] in x's dtype.

    This op is fused: without an implementation, a sum and the op rms_norm are used. The sum is
    rounded to x's dtype before the norm. weight is [features].
    """

    def __call__(
        self, x: jax.Array, residual: jax.Array, weight: jax.Array, *, eps: float
    ) -> tuple[jax.Array, jax.Array]: ...


RMS_NORM: Op[RmsNormOp] = Op(
    "rms_norm",
    RmsNormOp,
    "enginebay_xla.norm:rms_norm",
    "enginebay_xla.quick_cases:rms_norm_cases",
    CLOSE,
    kit="enginebay_xla.kit.kits:RMS_NORM",
    bench="enginebay_xla.bench.plain:RMS_NORM",
    cost="enginebay_xla.cost:rms_norm_cost",
    oracle="enginebay_testing.oracle:rms_norm",
    partition="enginebay_xla.partition:rms_norm",
)


ADD_RMS_NORM: Op[AddRmsNormOp] = Op(
    "add_rms_norm",
    AddRmsNormOp,
    "enginebay_xla.norm:add_rms_norm",
    "enginebay_xla.quick_cases:add_rms_norm_cases",
    CLOSE,
    made_of=("rms_norm",),
    composed="enginebay_xla.norm:composed_add_rms_norm",
    kit="enginebay_xla.kit.kits:ADD_RMS_NORM",
    bench="enginebay_xla.bench.fused:ADD_RMS_NORM",
    cost="enginebay_xla.cost:add_rms_norm_cost",
    partition="enginebay_xla.partition:add_rms_norm",
)
