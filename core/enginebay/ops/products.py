"""Products that kernels leave to XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def plain_product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Return x [T, inputs] times the transposed matrix [outputs, inputs], summed in f32.

    Products of f32 have full precision on every platform.
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == matrix.dtype == jnp.float32 else None
    numbers = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(
        x, matrix, numbers, precision=precision, preferred_element_type=jnp.float32
    )
