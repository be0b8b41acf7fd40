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
"""On CPUs, products of 16-bit dtypes are padded to this number of rows. XLA multiplies one row in a
scalar loop, 11 to 25 times slower, and two rows take 1.4 times as long as eight.
"""


def linear(
    x: jax.Array,
    weight: Weight,
    bias: jax.Array | None = None,
    *,
    out_dtype: jnp.dtype | str | None = None,
) -> jax.Array:
    """Return x times the transposed weight, plus the bias, in `out_dtype` or x's dtype.

    x is [T, *in_dims], weight [*out_dims, *in_dims], bias [*out_dims]; the result is
    [T, *out_dims]. Sums and the bias are f32, rounded once.
    """
    scales: jax.Array | None = None
    # The barrier lets XLA widen a weight only when x is known, so that not all weights of a step
    # are widened at once.
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
    # As matrices, because XLA:CPU copies and transposes a weight of more dimensions in every call.
    matrix = array.reshape(math.prod(out_dims), num_in)
    flat = x.reshape(x.shape[0], num_in)
    numbers = (((1,), (1,)), ((), ()))
    # full f32 on every platform, because other implementations are compared with it
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
    """Return the weight in `dtype`, and f32 scales [*outputs] for the products, or None."""
    if weight.zero_points is None and weight.scales.shape[-1] == 1:
        return weight.values.astype(dtype), weight.scales[..., 0]
    return weight.dequantized().astype(dtype), None


def _few_rows_are_slow(x: jax.Array, weight: jax.Array) -> bool:
    return (x.dtype in _NARROW or weight.dtype in _NARROW) and jax.default_backend() == "cpu"


def embedding(table: Weight, ids: jax.Array) -> jax.Array:
    """Return rows of the table: [T, features] for table [vocab, features] and ids int32 [T].

    Ids must be within the vocabulary. Rows of a quantised table are f32.
    """
    rows = jax.tree.map(lambda array: jnp.take(array, ids, axis=0, mode="clip"), table)
    return rows.dequantized() if isinstance(rows, QuantizedArray) else rows
