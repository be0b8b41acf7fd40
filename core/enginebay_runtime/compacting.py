"""compact_rows: a copy of the cache of a step's rows, with one page per row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays, KVLayout


def compact_rows(
    layout: KVLayout, cache: CacheArrays, table: jax.Array, num_tokens: int
) -> tuple[KVLayout, dict[str, jax.Array]]:
    """Copy the first `num_tokens` positions of rows into a cache with one page per row. Returns
    (layout of the copy, copy).

    table int32 [rows, pages_per_row]. `num_tokens` must not exceed pages_per_row * page_size.
    """
    small = layout.resized(num_pages=table.shape[0], page_size=num_tokens)
    pages_needed = -(-num_tokens // layout.page_size)

    def compact(array: jax.Array, axis: int) -> jax.Array:
        if pages_needed == 1:
            return jax.lax.slice_in_dim(array, 0, num_tokens, axis=axis)[table[:, 0]]
        rows = jnp.moveaxis(array[table[:, :pages_needed]], 1, axis)
        merged = rows.reshape(
            *rows.shape[:axis], pages_needed * layout.page_size, *rows.shape[axis + 2 :]
        )
        return jax.lax.slice_in_dim(merged, 0, num_tokens, axis=axis)

    return small, {
        name: compact(array, layout.offset_axis_of(name)) for name, array in cache.items()
    }
