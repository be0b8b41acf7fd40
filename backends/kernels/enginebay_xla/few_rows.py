"""Products of few rows in 16-bit dtypes on CPUs, which XLA multiplies slowly without padding."""

from __future__ import annotations

import jax
import jax.numpy as jnp

FEWEST_NARROW_ROWS = 8
"""On CPUs, products of 16-bit dtypes are padded to this number of rows. XLA multiplies one row in a
scalar loop, 11 to 25 times slower, and two rows take 1.4 times as long as eight.
"""

_NARROW = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def padded(x: jax.Array, *dtypes: jnp.dtype) -> jax.Array:
    """Return x [T, ...] with rows of zeros after it if a product of `dtypes` would be slow."""
    rows = x.shape[0]
    is_slow = any(dtype in _NARROW for dtype in dtypes) and jax.default_backend() == "cpu"
    if rows >= FEWEST_NARROW_ROWS or not is_slow:
        return x
    return jnp.pad(x, ((0, FEWEST_NARROW_ROWS - rows), *[(0, 0)] * (x.ndim - 1)))
