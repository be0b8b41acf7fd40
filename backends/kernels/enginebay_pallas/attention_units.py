"""Divides ragged rows into equal units of work, so that a kernel has regular blocks of queries and
outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import KVLayout
from enginebay.errors import InternalError
from enginebay.ops.spec import AttnBatch
from enginebay_pallas.generations import LANES, round_up
from enginebay_pallas.layout import TpuRpaLayout


class Units(NamedTuple):
    """U units; each has up to `block_q` consecutive new tokens of one row.

    rows[U + 1]: the row of each unit, -1 for a unit without work, and a final -1. first[U + 1]: how
    many new tokens of the row precede the unit. tokens[U, block_q]: indices into the packed tokens;
    any valid index where the unit has no token. unit_of[T], place_of[T]: unit and place of each
    packed token. `num_real`, a scalar of at least 1: units from there on have no work.
    """

    rows: jax.Array
    first: jax.Array
    tokens: jax.Array
    unit_of: jax.Array
    place_of: jax.Array
    num_real: jax.Array


def single_token_units(batch: AttnBatch, num_rows: jax.Array | None = None) -> Units:
    """Make row i unit i with token i.

    For decode steps, and for the first `num_rows` rows of mixed steps.
    """
    seqs, tokens = batch.bucket.seqs, batch.bucket.tokens
    rows = jnp.arange(seqs + 1, dtype=jnp.int32)
    real = batch.kv_lens > 0
    if num_rows is not None:
        real &= rows[:-1] < num_rows
    rows = jnp.where(jnp.pad(real, (0, 1)), rows, -1)
    places = jnp.arange(tokens, dtype=jnp.int32)
    return Units(
        rows,
        jnp.zeros_like(rows),
        jnp.minimum(jnp.arange(seqs, dtype=jnp.int32), tokens - 1)[:, None],
        jnp.minimum(places, seqs - 1),
        jnp.zeros_like(places),
        jnp.maximum(rows.max() + 1, 1),
    )


def chunk_units(batch: AttnBatch, block_q: int, skipped_rows: jax.Array | None = None) -> Units:
    """Divide the new tokens of all rows but the first `skipped_rows` into units of `block_q`."""
    bucket = batch.bucket
    num_units = min(bucket.seqs, bucket.tokens) + bucket.tokens // block_q
    q_lens = batch.q_lens
    if skipped_rows is not None:
        q_lens = jnp.where(jnp.arange(bucket.seqs) < skipped_rows, 0, q_lens)
    ends = jnp.cumsum(-(-q_lens // block_q), dtype=jnp.int32)
    starts = jnp.pad(ends, (1, 0))
    unit = jnp.arange(num_units + 1, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, unit, side="right").astype(jnp.int32), bucket.seqs - 1)
    first = (unit - starts[row]) * block_q
    real = (unit < ends[-1]) & (unit < num_units)
    offsets = first[:-1, None] + jnp.arange(block_q, dtype=jnp.int32)
    tokens = jnp.clip(batch.cu_q_lens[row[:-1], None] + offsets, 0, bucket.tokens - 1)
    owner = jnp.minimum(batch.seq_ids, bucket.seqs - 1)
    offset = jnp.arange(bucket.tokens, dtype=jnp.int32) - batch.cu_q_lens[owner]
    unit_of = jnp.clip(starts[owner] + offset // block_q, 0, num_units - 1)
    return Units(
        jnp.where(real, row, -1),
        jnp.where(real, first, 0),
        tokens,
        unit_of,
        jnp.maximum(offset, 0) % block_q,
        jnp.maximum(ends[-1], 1),
    )


def pack_queries(q: jax.Array, units: Units, num_kv_heads: int, padded_rows: int) -> jax.Array:
    """Return q [T, Hq, D] as [U, Hkv, padded_rows, D rounded up to lanes].

    Row g * block_q + i is token i of query head g.
    """
    tokens, num_heads, width = q.shape
    group = num_heads // num_kv_heads
    num_units, block_q = units.tokens.shape
    blocks = q.reshape(tokens, num_kv_heads, group, width)[units.tokens]
    rows = blocks.transpose(0, 2, 3, 1, 4).reshape(num_units, num_kv_heads, group * block_q, width)
    padding = (
        (0, 0),
        (0, 0),
        (0, padded_rows - group * block_q),
        (0, round_up(width, LANES) - width),
    )
    return jnp.pad(rows, padding)


def unpack_queries(blocks: jax.Array, units: Units, group: int, width: int) -> jax.Array:
    """Undo pack_queries: [U, Hkv, padded_rows, lanes] -> [T, Hq, width]."""
    num_units, num_kv_heads, _, lanes = blocks.shape
    block_q = units.tokens.shape[1]
    rows = blocks[:, :, : group * block_q].reshape(num_units, num_kv_heads, group, block_q, lanes)
    tokens = rows.transpose(0, 3, 1, 2, 4)[units.unit_of, units.place_of]
    return tokens.reshape(-1, num_kv_heads * group, lanes)[..., :width]


def pack_new(k: jax.Array, v: jax.Array, layout: KVLayout, spare_tokens: int) -> jax.Array:
    """Return k [T, Hkv, D] and v [T, Hkv, Dv] in the form of the layout's pages.

    The result is [T + spare_tokens, *token]; the last tokens are zeros.
    """
    if not isinstance(layout, TpuRpaLayout):
        raise InternalError(f"pallas attention writes to layout tpu_rpa, this is {layout.name}")
    new = layout.packed(k.astype(layout.dtype), v.astype(layout.dtype))
    return jnp.pad(new, ((0, spare_tokens), (0, 0), (0, 0), (0, 0)))
