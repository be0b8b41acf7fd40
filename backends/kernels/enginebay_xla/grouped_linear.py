"""The op grouped_linear in plain JAX: rows sorted by group, and a weight for each group."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from enginebay.weights import QuantizedArray, Weight
from enginebay_xla.linear import linear
from enginebay_xla.quantized_linear import sliced

BLOCKS = (8, 32, 128)
"""Rows of a block. The last block of a group is padded."""


def grouped_linear(
    x: jax.Array,
    weight: Weight,
    group_sizes: jax.Array,
    *,
    out_dtype: jnp.dtype | str | None = None,
) -> jax.Array:
    """Multiply the rows of each group by the weight of the group; GroupedLinearOp describes it.

    x is [T, inputs], weight [groups, outputs, inputs], group_sizes int32 [groups]. Returns
    [T, outputs] in `out_dtype` or x's dtype. The loop is over blocks of rows of one group. The
    weight of a group without rows is not read.
    """
    rows, (groups, outputs) = x.shape[0], weight.shape[:2]
    block = next((size for size in BLOCKS if rows <= 4 * size * groups), BLOCKS[-1])
    counts = -(-group_sizes // block)
    last = jnp.cumsum(counts)
    ends = jnp.cumsum(group_sizes)
    # Blocks may begin at any row. Padding keeps the slice of the last block inside the array.
    padded = jnp.pad(x, ((0, block), (0, 0)))
    dtype = jnp.dtype(out_dtype or x.dtype)

    def cut(array: jax.Array, group: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(array, group, keepdims=False)

    def add(i: jax.Array, out: jax.Array) -> jax.Array:
        group = jnp.searchsorted(last, i, side="right").astype(jnp.int32)
        start = ends[group] - group_sizes[group] + (i - (last[group] - counts[group])) * block
        if isinstance(weight, QuantizedArray):
            mine: Weight = sliced(weight, group, cut)
        else:
            mine = cut(weight, group)
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
    """Multiply every row by all weights and keep the result of its group; a slow reference."""
    group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(x.shape[0]), side="right")
    numbers = range(weight.shape[0])
    each = [jax.tree.map(lambda array, i=i: array[i], weight) for i in numbers]
    every = jnp.stack([linear(x, one, out_dtype=out_dtype) for one in each])
    is_mine = (jnp.arange(len(each))[:, None] == group)[..., None]
    return jnp.where(is_mine, every, 0).sum(axis=0).astype(every.dtype)
