"""The ops linear and embedding in plain JAX. Weights are [out, in], the orientation of Hugging Face checkpoints."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

_NARROW = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def linear(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    out_dtype: jnp.dtype | str | None = None,
) -> jax.Array:
    """x [T, *in_dims], weight [*out_dims, *in_dims], bias [*out_dims] -> [T, *out_dims] in `out_dtype` or x's dtype.

    Products are accumulated, and the bias added, in f32; the result is rounded once.
    """
    rows = x.shape[0]
    if rows == 1 and _one_row_is_slow(x, weight):
        x = jnp.concatenate([x, jnp.zeros_like(x)])
    out_dims = weight.shape[: weight.ndim - (x.ndim - 1)]
    # As plain matrices: XLA:CPU makes a transposed copy of a weight of more dimensions in every call.
    matrix = weight.reshape(math.prod(out_dims), -1)
    flat = x.reshape(x.shape[0], -1)
    out = jax.lax.dot_general(flat, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    out = out[:rows].reshape(rows, *out_dims)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(out_dtype or x.dtype)


def _one_row_is_slow(x: jax.Array, weight: jax.Array) -> bool:
    # XLA:CPU sends one-row products of narrow dtypes through a scalar loop, 11 to 25 times slower than two rows.
    return (x.dtype in _NARROW or weight.dtype in _NARROW) and jax.default_backend() == "cpu"


def embedding(table: jax.Array, ids: jax.Array) -> jax.Array:
    """table [vocab, features], ids int32 [T] within the vocabulary -> [T, features]."""
    return jnp.take(table, ids, axis=0, mode="clip")
