"""The ops linear and embedding in plain JAX. Weights are [out, in], the orientation of Hugging Face
checkpoints.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from enginebay.weights import QuantizedArray, Weight

_NARROW = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))

FEWEST_NARROW_ROWS = 8
"""Products of narrow dtypes are padded to this on the CPU: XLA sends one row through a scalar loop
(11 to 25 times slower), and two rows still take 1.4 times as long as eight (docs/performance.md).
"""


def linear(
    x: jax.Array,
    weight: Weight,
    bias: jax.Array | None = None,
    *,
    out_dtype: jnp.dtype | str | None = None,
) -> jax.Array:
    """x [T, *in_dims], weight [*out_dims, *in_dims], bias [*out_dims] -> [T, *out_dims] in
    `out_dtype` or x's dtype.

    Products are accumulated, and the bias added, in f32; the result is rounded once.
    """
    scales: jax.Array | None = None
    # A weight is widened after x is there and in each turn of a loop: never all of a step at once.
    if isinstance(weight, QuantizedArray):
        quantized, x = jax.lax.optimization_barrier((weight, x))
        array, scales = _factors(quantized, x.dtype)
    elif weight.dtype != x.dtype:
        array, x = jax.lax.optimization_barrier((weight, x))
    else:
        array = weight
    rows = x.shape[0]
    if rows < FEWEST_NARROW_ROWS and _few_rows_are_slow(x, array):
        x = jnp.pad(x, ((0, FEWEST_NARROW_ROWS - rows), *[(0, 0)] * (x.ndim - 1)))
    num_in = math.prod(x.shape[1:])
    out_dims = array.shape[: array.ndim - (x.ndim - 1)]
    # As plain matrices: XLA:CPU makes a transposed copy of a weight of more dimensions in every
    # call.
    matrix = array.reshape(math.prod(out_dims), num_in)
    flat = x.reshape(x.shape[0], num_in)
    numbers = (((1,), (1,)), ((), ()))
    # f32 is f32 on every platform: this is what others are compared with
    precision = jax.lax.Precision.HIGHEST if x.dtype == array.dtype == jnp.float32 else None
    out = jax.lax.dot_general(
        flat, matrix, numbers, precision=precision, preferred_element_type=jnp.float32
    )
    out = out[:rows].reshape(rows, *out_dims)
    if scales is not None:
        out = out * scales
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(out_dtype or x.dtype)


def _factors(weight: QuantizedArray, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array | None]:
    """The weight in `dtype`, and f32 scales [*outputs] that its products are still to be multiplied
    with.
    """
    if weight.zero_points is None and weight.scales.shape[-1] == 1:
        return weight.values.astype(dtype), weight.scales[..., 0]
    return weight.dequantized().astype(dtype), None


def _few_rows_are_slow(x: jax.Array, weight: jax.Array) -> bool:
    return (x.dtype in _NARROW or weight.dtype in _NARROW) and jax.default_backend() == "cpu"


def embedding(table: Weight, ids: jax.Array) -> jax.Array:
    """table [vocab, features], ids int32 [T] within the vocabulary -> [T, features]; f32 of a
    quantised table.
    """
    rows = jax.tree.map(lambda array: jnp.take(array, ids, axis=0, mode="clip"), table)
    return rows.dequantized() if isinstance(rows, QuantizedArray) else rows
