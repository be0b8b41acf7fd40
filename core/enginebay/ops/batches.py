"""Makes the AttnBatch of a step from the lengths and the page table of its rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from enginebay.ops.spec import AttnBatch, Bucket


def derive_batch(
    q_lens: jax.Array, kv_lens: jax.Array, page_table: jax.Array, page_size: int, bucket: Bucket
) -> AttnBatch:
    """Make an AttnBatch from q_lens [S], kv_lens [S] and page_table [S, P], also inside jit.

    Rows must be sorted: first rows with one new token after a prefix (decode), then rows without a
    prefix (prefill), then other rows, then padding rows, whose lengths are both 0. A decode bucket
    may have padding rows anywhere.
    """
    if bucket.mode == "decode":
        return _derive_decode(kv_lens, page_table, page_size, bucket)
    cu = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(q_lens, dtype=jnp.int32)])
    token = jnp.arange(bucket.tokens, dtype=jnp.int32)
    seq = jnp.searchsorted(cu[1:], token, side="right").astype(jnp.int32)
    real = token < cu[-1]
    row = jnp.minimum(seq, bucket.seqs - 1)
    positions = jnp.where(real, kv_lens[row] - q_lens[row] + token - cu[row], 0)
    pages = page_table[row, jnp.minimum(positions // page_size, bucket.pages_per_seq - 1)]
    slots = jnp.where(real, pages * page_size + positions % page_size, -1)
    decode = (q_lens == 1) & (kv_lens > 1)
    fresh = (q_lens > 0) & (q_lens == kv_lens)
    num_decode, num_fresh = decode.sum(), fresh.sum()
    distribution = jnp.stack([num_decode, num_decode + num_fresh, (q_lens > 0).sum()]).astype(
        jnp.int32
    )
    return AttnBatch(
        positions=positions,
        cu_q_lens=cu,
        kv_lens=kv_lens,
        page_table=page_table,
        slots=slots,
        seq_ids=jnp.where(real, seq, bucket.seqs),
        distribution=distribution,
        bucket=bucket,
    )


def _derive_decode(
    kv_lens: jax.Array, page_table: jax.Array, page_size: int, bucket: Bucket
) -> AttnBatch:
    rows = jnp.arange(bucket.seqs, dtype=jnp.int32)
    live = kv_lens > 0
    positions = jnp.maximum(kv_lens - 1, 0)
    pages = page_table[rows, jnp.minimum(positions // page_size, bucket.pages_per_seq - 1)]
    slots = jnp.where(live, pages * page_size + positions % page_size, -1)
    cu = jnp.arange(bucket.seqs + 1, dtype=jnp.int32)
    distribution = jnp.full((3,), bucket.seqs, jnp.int32)
    return AttnBatch(
        positions=positions,
        cu_q_lens=cu,
        kv_lens=kv_lens,
        page_table=page_table,
        slots=slots,
        seq_ids=jnp.where(live, rows, bucket.seqs),
        distribution=distribution,
        bucket=bucket,
    )
