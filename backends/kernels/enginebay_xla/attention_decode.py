"""Attention of decode steps: two batched products over all keys of all rows at once."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket
from enginebay_xla.softmax import (
    LOWEST,
    Partial,
    batched_dot,
    finish,
    is_cpu,
    scale_scores,
    visible_keys,
)


def fits_whole(bucket: Bucket, layout: KVLayout) -> bool:
    """Return whether a decode step should read all keys of all rows at once.

    On accelerators it always should. On a CPU it should only if the cache can be multiplied as it
    is: otherwise the step would first gather pages or shorten rows, and that copy does not fit the
    processor's cache. It is then faster to read one row after the other, in chunks. A quantised
    cache is always read in chunks, so that never all of it is converted at once.
    """
    as_it_lies = (
        bucket.rows_are_pages and layout.name == "hnd" and bucket.max_kv_len >= layout.page_size
    )
    whole = layout.storage is None and bucket.mode == "decode"
    return whole and (as_it_lies or not is_cpu())


def attend_one_token_rows(
    q: jax.Array,
    cache: CacheArrays,
    batch: AttnBatch,
    *,
    spec: AttnSpec,
    layout: KVLayout,
    inputs: Mapping[str, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Return (out [S, Hq, Dv], log-sum-exp f32 [S, Hq]) for q [S, Hq, D], one token per row."""
    wide = jnp.promote_types(q.dtype, layout.dtype)
    k, v = (x.astype(wide) for x in _whole_rows(cache, batch, layout))
    rows, heads, group = q.shape[0], spec.num_kv_heads, spec.group
    grouped = q.reshape(rows, heads, group, spec.head_dim).astype(k.dtype)
    if group == 1 and k.dtype != jnp.float32 and is_cpu():
        # XLA:CPU multiplies a single row of a 16-bit dtype in a scalar loop, so it gets two.
        grouped = jnp.concatenate([grouped, grouped], axis=2)
    kv_lens = batch.kv_lens[:, None, None, None]
    visible = visible_keys(jnp.arange(k.shape[2]), kv_lens - 1, kv_lens, spec)
    by_group = {name: x.reshape(heads, group) for name, x in inputs.items()}
    products = batched_dot(grouped, k, (3, 3), 2)
    away = jnp.arange(k.shape[2]) - (kv_lens - 1)
    scores = scale_scores(products, away, visible, spec, by_group)
    maximum = jnp.maximum(scores.max(axis=-1), LOWEST)
    weights = jnp.exp(scores - maximum[..., None])
    values = _weighted_values(weights.astype(v.dtype), v, visible[:, :, 0, :, None])
    state = Partial(*(part[:, :, :group] for part in (maximum, weights.sum(axis=-1), values)))
    out, lse = finish(state, by_group)
    out = out[..., : spec.v_dim]
    return out.reshape(rows, heads * group, -1).astype(q.dtype), lse.reshape(rows, heads * group)


def _whole_rows(
    cache: CacheArrays, batch: AttnBatch, layout: KVLayout
) -> tuple[jax.Array, jax.Array]:
    """Return k and v [S, Hkv, keys, D] of the rows' first max_kv_len positions or more.

    Where values are columns of the keys, v is the whole keys, because a slice would copy the cache.
    """
    bucket = batch.bucket
    if bucket.rows_are_pages and layout.name == "hnd":
        length = min(bucket.max_kv_len, layout.page_size)
        return cache["k"][:, :, :length], cache.get("v", cache["k"])[:, :, :length]
    num_pages = min(bucket.pages_per_seq, -(-bucket.max_kv_len // layout.page_size))
    k, v = layout.read(cache, batch.page_table[:, :num_pages])
    rows = (bucket.seqs, num_pages * layout.page_size, layout.num_kv_heads, layout.head_dim)
    v = k if layout.v_prefix_dim else v
    return k.reshape(rows).swapaxes(1, 2), v.reshape(rows).swapaxes(1, 2)


def _weighted_values(weights: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """Return weights [S, H, G, L] @ v [S, H, L, D], ignoring v where `visible` is False.

    The weight is 0 there, so only a NaN or an infinity in a stale place could change the result. To
    zero v would cost XLA:CPU a copy of the cache in every step. So the product is computed as it
    is, and repeated with zeros in the rare case that it is not finite.
    """
    if not is_cpu():
        return batched_dot(weights, jnp.where(visible, v, 0), (3, 2), 2)

    def zeroed_row(row: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        weights, v, visible = row
        return batched_dot(weights, jnp.where(visible, v, 0), (2, 1), 1)

    product = batched_dot(weights, v, (3, 2), 2)
    # Row by row, so that the copy and its memory have the size of one row.
    return jax.lax.cond(
        jnp.isfinite(product).all(),
        lambda: product,
        lambda: jax.lax.map(zeroed_row, (weights, v, visible)),
    )
