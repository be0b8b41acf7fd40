"""Rounds the inputs of products with quantised weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp

LARGEST = 127
"""Largest value. Values are symmetric around 0, so -128 is not used."""


def rounded_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return x [rows, inputs] as int8, and the scale of each row, f32 [rows, 1].

    The scale is the largest absolute value of the row / 127; a row of zeros has scale 0.
    """
    wide = x.astype(jnp.float32)
    scales = jnp.abs(wide).max(axis=1, keepdims=True, initial=0.0) / LARGEST
    values = jnp.rint(wide / jnp.where(scales > 0, scales, 1.0))
    return values.astype(jnp.int8), scales
