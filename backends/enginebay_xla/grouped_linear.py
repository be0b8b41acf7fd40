"""The op grouped_linear in plain JAX: rows sorted by group, and a weight for each group."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from enginebay.weights import QuantizedArray, Weight
from enginebay_xla.linear import linear

BLOCKS = (8, 32, 128)
"""Rows that are multiplied together; a group's last block is padded."""


def grouped_linear(
    x: jax.Array,
    weight: Weight,
    group_sizes: jax.Array,
    *,
    out_dtype: jnp.dtype | str | None = None,
) -> jax.Array:
    """x [T, inputs], weight [groups, outputs, inputs], group_sizes int32 [groups] -> [T, outputs]
    in `out_dtype` or x's dtype; see GroupedLinearOp.

    A loop over blocks of one group's rows: a group without rows costs nothing, and its weight is
    not read.
    """
    rows, (groups, outputs) = x.shape[0], weight.shape[:2]
    block = next((size for size in BLOCKS if rows <= 4 * size * groups), BLOCKS[-1])
    counts = -(-group_sizes // block)
    last = jnp.cumsum(counts)
    ends = jnp.cumsum(group_sizes)
    # Blocks begin at any row: padded so that a slice of the last one stays inside.
    padded = jnp.pad(x, ((0, block), (0, 0)))
    dtype = jnp.dtype(out_dtype or x.dtype)

    def add(i: jax.Array, out: jax.Array) -> jax.Array:
        group = jnp.searchsorted(last, i, side="right").astype(jnp.int32)
        start = ends[group] - group_sizes[group] + (i - (last[group] - counts[group])) * block
        mine = jax.tree.map(
            lambda array: jax.lax.dynamic_index_in_dim(array, group, keepdims=False), weight
        )
        part = linear(jax.lax.dynamic_slice_in_dim(padded, start, block), mine, out_dtype=dtype)
        inside = (start + jnp.arange(block) < ends[group])[:, None]
        before = jax.lax.dynamic_slice_in_dim(out, start, block)
        return jax.lax.dynamic_update_slice_in_dim(
            out, jnp.where(inside, part, before), start, axis=0
        )

    empty = jnp.zeros((rows + block, outputs), dtype)
    return jax.lax.fori_loop(0, last[-1], add, empty)[:rows]


def grouped_linear_reference(
    x: jax.Array,
    weight: Weight,
    group_sizes: jax.Array,
    *,
    out_dtype: jnp.dtype | str | None = None,
) -> jax.Array:
    """The same, every row by the weights of all groups, of which one is kept. For checks."""
    group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(x.shape[0]), side="right")
    whole = weight.dequantized() if isinstance(weight, QuantizedArray) else weight
    every = jnp.stack([linear(x, one, out_dtype=out_dtype) for one in whole])
    is_mine = (jnp.arange(len(whole))[:, None] == group)[..., None]
    return jnp.where(is_mine, every, 0).sum(axis=0).astype(every.dtype)
