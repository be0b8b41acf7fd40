"""The op linear with plain weights that are rounded as a quantisation would round them. As shadows
they show on live steps what quantised weights would change.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from enginebay.errors import InputError
from enginebay.weights import QuantizedArray, Weight
from enginebay_xla.linear import linear

GROUP = 32
"""Inputs that share a scale of 4 bits; all of an output, if their number is no multiple of it."""


def linear_by_int8(
    x: jax.Array,
    weight: Weight,
    bias: jax.Array | None = None,
    *,
    out_dtype: jnp.dtype | str | None = None,
) -> jax.Array:
    """The op linear with a weight rounded to int8, one scale per output, as the quantisation int8
    rounds it. InputError for a weight that is quantised already.
    """
    flat = _flat(x, weight)
    largest = jnp.abs(flat).max(axis=-1, keepdims=True)
    rounded = _rounded(flat, largest / 127, (-127, 127)).reshape(weight.shape)
    return linear(x, rounded, bias, out_dtype=out_dtype or x.dtype)


def linear_by_int4(
    x: jax.Array,
    weight: Weight,
    bias: jax.Array | None = None,
    *,
    out_dtype: jnp.dtype | str | None = None,
) -> jax.Array:
    """The op linear with a weight rounded to 4 bits in groups of GROUP inputs; the number of
    largest magnitude becomes -8. InputError for a weight that is quantised already.
    """
    flat = _flat(x, weight)
    size = GROUP if flat.shape[-1] % GROUP == 0 else flat.shape[-1]
    groups = flat.reshape(len(flat), -1, size)
    at = jnp.abs(groups).argmax(axis=-1)[..., None]
    scales = jnp.take_along_axis(groups, at, axis=-1)[..., 0] / -8
    rounded = _rounded(flat, scales, (-8, 7)).reshape(weight.shape)
    return linear(x, rounded, bias, out_dtype=out_dtype or x.dtype)


def _flat(x: jax.Array, weight: Weight) -> jax.Array:
    """Return a plain weight in f32, as [outputs, inputs]."""
    if isinstance(weight, QuantizedArray):
        raise InputError(
            f"a weight that is quantised by {weight.method}",
            "plain weights",
            "Leave --quantization out, or pass none.",
        )
    return weight.reshape(-1, math.prod(x.shape[1:])).astype(jnp.float32)


def _rounded(flat: jax.Array, scales: jax.Array, limits: tuple[int, int]) -> jax.Array:
    """Return a weight [outputs, inputs], rounded with scales [outputs, groups]."""
    groups = flat.reshape(*scales.shape, -1)
    steps = jnp.where(scales == 0, 1, scales)[..., None]
    return (jnp.rint(groups / steps).clip(*limits) * steps).reshape(flat.shape)
