"""The ops linear and embedding in plain JAX. Weights are [out, in], the orientation of Hugging Face
checkpoints.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from enginebay.weights import QuantizedArray, Weight
from enginebay_xla.few_rows import padded
from enginebay_xla.quantized_linear import quantized_linear


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
    if isinstance(weight, QuantizedArray):
        return quantized_linear(x, weight, bias, out_dtype=out_dtype)
    array, rows = weight, x.shape[0]
    if array.dtype != x.dtype:
        # The barrier lets XLA widen a weight only when x is known, so that not all weights of a
        # step are widened at once.
        array, x = jax.lax.optimization_barrier((array, x))
    x = padded(x, x.dtype, array.dtype)
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
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(out_dtype or x.dtype)


def embedding(table: Weight, ids: jax.Array) -> jax.Array:
    """Return rows of the table: [T, features] for table [vocab, features] and ids int32 [T].

    Ids must be within the vocabulary. Rows of a quantised table are f32.
    """
    rows = jax.tree.map(lambda array: jnp.take(array, ids, axis=0, mode="clip"), table)
    return rows.dequantized() if isinstance(rows, QuantizedArray) else rows
