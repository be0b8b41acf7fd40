"""How calls of linear, rms_norm and add_rms_norm are split over devices, for implementations
that the compiler cannot split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from enginebay.ops.op import Partition
from enginebay_xla.ops import AddRmsNormOp, LinearOp, RmsNormOp

Total = Callable[[jax.Array], jax.Array]


def _names(letter: str, count: int) -> str:
    return " ".join(f"{letter}{i}" for i in range(count))


def linear(
    impl: LinearOp, x: Any, weight: Any, bias: Any = None, *, out_dtype: Any = None
) -> Partition:
    """Products whose inputs are split are summed in f32, and rounded once with the bias."""
    inner = _names("i", x.ndim - 1)
    outer = _names("o", weight.ndim - (x.ndim - 1))

    def run(total: Total, x: jax.Array, weight: jax.Array, *bias: jax.Array) -> jax.Array:
        out = total(impl(x, weight, out_dtype=jnp.float32))
        out = out if not bias else out + bias[0].astype(jnp.float32)
        return out.astype(out_dtype or x.dtype)

    biases = () if bias is None else (outer,)
    return Partition((f"t {inner}", f"{outer} {inner}", *biases), (f"t {outer}",), run)


def rms_norm(impl: RmsNormOp, x: Any, weight: Any, *, eps: float) -> Partition:
    """Rows, and heads, are split; the features that are normed are not."""
    rows = f"{_names('r', x.ndim - 1)} f"

    def run(total: Total, *arrays: jax.Array) -> jax.Array:
        return impl(*arrays, eps=eps)

    return Partition((rows, "f"), (rows,), run, whole=("f",))


def add_rms_norm(
    impl: AddRmsNormOp, x: Any, residual: Any, weight: Any, *, eps: float
) -> Partition:
    """As rms_norm."""
    rows = f"{_names('r', x.ndim - 1)} f"

    def run(total: Total, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        return impl(*arrays, eps=eps)

    return Partition((rows, rows, "f"), (rows, rows), run, whole=("f",))
