"""Products with quantised weights in plain JAX. A weight is dequantised some outputs at a time, so
that no program holds a dequantised weight.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from enginebay.ops.activations import INT8_GROUP, rounded_groups, rounded_rows
from enginebay.weights import FLOAT, QuantizedArray
from enginebay_xla.few_rows import padded

CPU_BLOCK_BYTES, BLOCK_BYTES = 1 << 20, 64 << 20
"""Bytes of the outputs that are dequantised at once. On a CPU they stay in the second-level cache
until they are multiplied.
"""


def quantized_linear(
    x: jax.Array,
    weight: QuantizedArray,
    bias: jax.Array | None = None,
    *,
    out_dtype: jnp.dtype | str | None = None,
) -> jax.Array:
    """The op linear for x [T, *inputs] and a weight [*outputs, *inputs]; the bias and one rounding
    follow the product.

    With activations "int8", each row of x becomes int8 with one scale, and int8 numbers are
    multiplied with whole numbers; the sums are int32. With "int8_group" the rounded numbers are
    multiplied in f32. Otherwise the weight is multiplied in the dtype of x; the sums are f32.
    """
    num_in = math.prod(x.shape[1:])
    out_dims = weight.scales.shape[:-1]
    outputs, groups = math.prod(out_dims), weight.scales.shape[-1]
    # The barrier lets XLA widen a weight only when x is known, so that not all weights of a step
    # are widened at once.
    weight, x = jax.lax.optimization_barrier((weight, x))
    points = weight.zero_points
    matrix = dataclasses.replace(
        weight,
        values=weight.values.reshape(outputs, num_in),
        scales=weight.scales.reshape(outputs, groups),
        zero_points=None if points is None else points.reshape(outputs, groups),
    )
    flat = padded(x.reshape(x.shape[0], num_in), x.dtype)
    item = 4 if x.dtype == jnp.float32 else 2
    room = CPU_BLOCK_BYTES if jax.default_backend() == "cpu" else BLOCK_BYTES
    if weight.activations == INT8_GROUP:
        flat, item = rounded_groups(flat), 4
    if weight.activations in (FLOAT, INT8_GROUP):
        product: Callable[[QuantizedArray], jax.Array] = functools.partial(_product, flat)
        row_bytes = num_in * item
    else:
        rounded, factors = rounded_rows(flat)
        product = functools.partial(_rounded_product, rounded, factors)
        row_bytes = 4 * max(num_in, groups * flat.shape[0])
    wide = _by_blocks(product, matrix, flat.shape[0], max(1, room // max(1, row_bytes)))
    out = wide[: x.shape[0]].reshape(x.shape[0], *out_dims)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(out_dtype or x.dtype)


def sliced(
    weight: QuantizedArray, start: jax.Array, cut: Callable[[jax.Array, jax.Array], jax.Array]
) -> QuantizedArray:
    """Return the part of a weight that `cut` takes from each of its arrays at `start`. For the body
    of a loop: XLA neither converts nor copies the whole weight, before the loop or in it.
    """
    weight, start = jax.lax.optimization_barrier((weight, start))
    dtype = weight.values.dtype
    is_float = jnp.issubdtype(dtype, jnp.floating)
    if is_float:
        # XLA:CPU slices fp8 as f16, for which it converts the whole array; bytes it slices as such.
        values = jax.lax.bitcast_convert_type(weight.values, jnp.uint8)
        weight = dataclasses.replace(weight, values=values)
    part = jax.tree.map(lambda array: cut(array, start), weight)
    if is_float:
        values = jax.lax.bitcast_convert_type(part.values, dtype)
        part = dataclasses.replace(part, values=values)
    return part


def _by_blocks(
    product: Callable[[QuantizedArray], jax.Array], weight: QuantizedArray, rows: int, block: int
) -> jax.Array:
    """Return [rows, outputs] from the products with blocks of outputs. The last block begins before
    its place, as slices do at the end of an array.
    """
    outputs = weight.values.shape[0]
    if outputs <= block:
        return product(weight)

    def cut(array: jax.Array, first: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(array, first, block)

    def add(i: jax.Array, out: jax.Array) -> jax.Array:
        part = product(sliced(weight, i * block, cut))
        return jax.lax.dynamic_update_slice_in_dim(out, part, i * block, axis=1)

    return jax.lax.fori_loop(0, -(-outputs // block), add, jnp.zeros((rows, outputs), jnp.float32))


def _product(x: jax.Array, weight: QuantizedArray) -> jax.Array:
    """Return x [T, inputs] times a weight [outputs, inputs], multiplied in the dtype of x."""
    if weight.zero_points is None and weight.scales.shape[-1] == 1:
        return _dot(x, weight.values.astype(x.dtype)) * weight.scales[:, 0].astype(jnp.float32)
    return _dot(x, weight.dequantized().astype(x.dtype))


def _dot(x: jax.Array, matrix: jax.Array) -> jax.Array:
    # full f32 on every platform, because other implementations are compared with it
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x,
        matrix,
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _rounded_product(rounded: jax.Array, factors: jax.Array, weight: QuantizedArray) -> jax.Array:
    """Return the product of rounded rows, int8 [T, inputs] with scales [T, 1], with a weight."""
    if not jnp.issubdtype(weight.values.dtype, jnp.integer):
        return _dot(rounded.astype(jnp.float32), weight.dequantized()) * factors
    outputs, groups = weight.scales.shape
    values = weight.values.astype(jnp.int8).reshape(outputs, groups, -1)
    inputs = rounded.reshape(rounded.shape[0], *values.shape[1:])
    sums = jax.lax.dot_general(
        inputs, values, (((2,), (2,)), ((1,), (1,))), preferred_element_type=jnp.int32
    ).astype(jnp.float32)  # [groups, rows, outputs]
    if weight.zero_points is not None:
        totals = inputs.sum(axis=2, dtype=jnp.int32).astype(jnp.float32)
        sums = sums - totals.T[..., None] * weight.zero_points.T[:, None].astype(jnp.float32)
    return (sums * weight.scales.T[:, None].astype(jnp.float32)).sum(axis=0) * factors
