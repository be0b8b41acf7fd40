"""The op linear: products of few rows in C++, others by XLA."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from enginebay_native.calls import register

MOST_ROWS = 48
"""XLA's product is faster for more (docs/performance.md)."""

TARGET = register("linear")


def linear(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    out_dtype: jnp.dtype | str | None = None,
) -> jax.Array:
    """x [T, *in_dims], weight [*out_dims, *in_dims], bias [*out_dims] -> [T, *out_dims] in `out_dtype` or x's dtype.

    Products are accumulated, and the bias added, in f32; the result is rounded once. Up to MOST_ROWS rows, each one's
    result is the same bits however many there are.
    """
    out_dims = weight.shape[: weight.ndim - (x.ndim - 1)]
    matrix = weight.reshape(math.prod(out_dims), -1)
    flat = x.reshape(x.shape[0], -1)
    if (
        flat.shape[0] <= MOST_ROWS
        and flat.dtype == matrix.dtype
        and flat.dtype in (jnp.float32, jnp.bfloat16)
    ):
        shape = jax.ShapeDtypeStruct((flat.shape[0], matrix.shape[0]), jnp.float32)
        out = jax.ffi.ffi_call(TARGET, shape)(flat, matrix)
    else:
        precision = jax.lax.Precision.HIGHEST if flat.dtype == matrix.dtype == jnp.float32 else None
        numbers = (((1,), (1,)), ((), ()))
        out = jax.lax.dot_general(
            flat, matrix, numbers, precision=precision, preferred_element_type=jnp.float32
        )
    out = out.reshape(x.shape[0], *out_dims)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(out_dtype or x.dtype)
