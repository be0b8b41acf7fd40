"""Rounds the inputs of products with quantised weights."""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp

from enginebay.errors import UnsupportedError

LARGEST = 127
"""Largest value. Values are symmetric around 0, so -128 is not used."""

INT8: Final = "int8"
"""`QuantizedArray.activations` where each row of inputs has one scale: `rounded_rows`."""

INT8_GROUP: Final = "int8_group"
"""The same where each group of GROUP_SIZE inputs of a row has one: `rounded_groups`."""

GROUP_SIZE = 32


def rounded_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return x [rows, inputs] as int8, and the scale of each row, f32 [rows, 1].

    The scale is the largest absolute value of the row / 127; a row of zeros has scale 0.
    """
    wide = x.astype(jnp.float32)
    scales = jnp.abs(wide).max(axis=1, keepdims=True, initial=0.0) / LARGEST
    values = jnp.rint(wide / jnp.where(scales > 0, scales, 1.0))
    return values.astype(jnp.int8), scales


def rounded_groups(x: jax.Array) -> jax.Array:
    """Return x [rows, inputs] rounded to int8 numbers times a scale, f32. Each group of GROUP_SIZE
    inputs of a row, of which the last one may be shorter, is rounded as a row of `rounded_rows`.
    """
    inputs = x.shape[1]
    padded = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -inputs % GROUP_SIZE)))
    values, scales = rounded_rows(padded.reshape(padded.size // GROUP_SIZE, GROUP_SIZE))
    return (values * scales).reshape(padded.shape)[:, :inputs]


def require_row_scales(activations: str) -> None:
    """Raise UnsupportedError unless inputs are rounded with one scale for each row. Kernels that
    use `rounded_rows` alone call this, because anybody may call them without a plan.
    """
    if activations != INT8:
        raise UnsupportedError(
            f"inputs that are rounded by {activations!r}",
            f"{INT8!r}, which is what this kernel does",
            "Choose another kernel, or activation_quantization = 'int8'.",
        )
