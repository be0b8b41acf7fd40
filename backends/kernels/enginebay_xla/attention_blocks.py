"""Attention over packed ragged rows: each block of queries of a row is multiplied with chunks of
the row's keys, with an online softmax.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.ops.kv_storage import QUANTIZE, narrowed
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket
from enginebay_xla.softmax import (
    Partial,
    add_keys,
    batched_dot,
    empty_partial,
    finish,
    scale_scores,
    visible_keys,
)

MAX_BLOCK, MIN_KEY_CHUNK = 128, 64
DECODE_KEY_CHUNK = 512
"""Block sizes. 128 queries by 128 keys were the fastest of 64 to 256 on AVX-512 cores, for prompts
of 128 to 1,024 tokens with and without a prefix. The part of a chunk after the end of a row is
wasted, so shorter prompts have chunks of 64.
"""

BLOCK_SIZES = (64, 128, 256, 512, 1024)
"""Block sizes that the tuner tries."""


@dataclasses.dataclass(frozen=True)
class AttentionBlocks:
    """Queries of a row per block, at most, and keys per chunk."""

    query_block: int
    key_chunk: int


def default_blocks(bucket: Bucket) -> AttentionBlocks:
    """Return the sizes that were fastest on the machines of docs/performance.md."""
    return AttentionBlocks(
        _fitting(MAX_BLOCK, bucket),
        DECODE_KEY_CHUNK
        if bucket.max_q_len == 1
        else max(MIN_KEY_CHUNK, _fitting(MAX_BLOCK, bucket)),
    )


def block_candidates(bucket: Bucket) -> list[AttentionBlocks]:
    """Return every pair of sizes that differs for this bucket."""
    queries = dict.fromkeys(_fitting(size, bucket) for size in BLOCK_SIZES)
    longest = max(BLOCK_SIZES[0], bucket.max_kv_len)
    keys = [size for size in BLOCK_SIZES if size <= longest]
    return [AttentionBlocks(query, key) for query in queries for key in keys]


def _fitting(size: int, bucket: Bucket) -> int:
    """Return the size, or the power of two that holds the bucket's longest row; at least two."""
    return min(size, 1 << max(1, bucket.max_q_len - 1).bit_length())


ReadChunk = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class KeySource:
    """The source of a row's keys.

    `read(row, i)` returns k and v [Hkv, size, D] of chunk i, and the chunk's first position.
    """

    size: int
    read: ReadChunk


def attend_blocks(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cache: CacheArrays,
    batch: AttnBatch,
    *,
    spec: AttnSpec,
    layout: KVLayout,
    inputs: Mapping[str, jax.Array],
    blocks: AttentionBlocks | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return (out [T, Hq, Dv], log-sum-exp f32 [T, Hq]) for q [T, Hq, D]; 0 on padding tokens.

    Prefill reads the new k and v only. Other modes read the cache chunk by chunk; it has the new
    keys and values already.
    """
    bucket, tokens = batch.bucket, q.shape[0]
    blocks = blocks or default_blocks(bucket)
    if bucket.mode == "prefill" and k is not None and v is not None:
        keys = _as_cached(k, layout)
        # Values that are a prefix of keys are stored with the scales of the keys.
        prefix = layout.v_prefix_dim
        values = keys[..., :prefix] if prefix else _as_cached(v, layout)
        source = _fresh_keys(keys, values, batch, blocks.key_chunk)
    else:
        source = _cached_keys(cache, batch, layout, blocks.key_chunk)
    largest = blocks.query_block
    wide = jnp.promote_types(q.dtype, layout.dtype)
    heads = q.astype(wide).reshape(tokens, spec.num_kv_heads, spec.group, spec.head_dim)
    heads = jnp.pad(heads.transpose(1, 2, 0, 3), ((0, 0), (0, 0), (0, largest), (0, 0)))
    _, lse, out = empty_partial(heads, spec.v_dim)
    done = (out, lse)
    by_group = {name: x.reshape(spec.num_kv_heads, spec.group) for name, x in inputs.items()}
    one_token = (
        1 if spec.group > 1 else 2
    )  # XLA:CPU multiplies a single row of a 16-bit dtype in a scalar loop.
    if bucket.mode == "prefill":
        sizes = {largest: batch.q_lens > 0}
    elif bucket.mode == "decode" or bucket.max_q_len == 1:
        sizes = {one_token: batch.kv_lens > 0}
    else:
        sizes = {one_token: batch.q_lens == 1, largest: batch.q_lens > 1}
    for size, rows in sizes.items():
        done = _run_blocks(
            heads,
            done,
            source,
            batch=batch,
            rows=rows,
            size=size,
            spec=spec,
            inputs=by_group,
        )
    out, lse = (part[:, :, :tokens] for part in done)
    out = out.transpose(2, 0, 1, 3).reshape(tokens, spec.num_q_heads, spec.v_dim)
    return out.astype(q.dtype), lse.transpose(2, 0, 1).reshape(tokens, spec.num_q_heads)


def _run_blocks(
    heads: jax.Array,
    done: tuple[jax.Array, jax.Array],
    source: KeySource,
    batch: AttnBatch,
    rows: jax.Array,
    size: int,
    spec: AttnSpec,
    inputs: Mapping[str, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Write the results of the chosen `rows` (bool [S]) into `done`, `size` tokens at a time."""
    q_lens = batch.q_lens
    ends = jnp.cumsum(jnp.where(rows, -(-q_lens // size), 0))
    num_kv_heads, group, _, head_dim = heads.shape

    def run(i: jax.Array, done: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        row = jnp.searchsorted(ends, i, side="right").astype(jnp.int32)
        offset = (i - jnp.where(row > 0, ends[row - 1], 0)) * size
        start = batch.cu_q_lens[row] + offset
        first = batch.kv_lens[row] - q_lens[row] + offset
        count = jnp.minimum(size, q_lens[row] - offset)
        block = jax.lax.dynamic_slice_in_dim(heads, start, size, axis=2)
        block = block.reshape(num_kv_heads, group * size, head_dim)
        positions = first + jnp.tile(jnp.arange(size), group)
        out, lse = _attend_block(
            block,
            positions,
            first,
            count,
            row=row,
            source=source,
            batch=batch,
            spec=spec,
            inputs={name: _per_query(x, size) for name, x in inputs.items()},
        )
        return (
            _merge(done[0], out.reshape(num_kv_heads, group, size, spec.v_dim), start, count),
            _merge(done[1], lse.reshape(num_kv_heads, group, size), start, count),
        )

    return jax.lax.fori_loop(0, ends[-1], run, done)


def _per_query(per_head: jax.Array, size: int) -> jax.Array:
    """Repeat an input [Hkv, G] for a block's queries: [Hkv, G * size]."""
    return jnp.repeat(per_head, size, axis=1)


def _attend_block(
    block: jax.Array,
    positions: jax.Array,
    first: jax.Array,
    count: jax.Array,
    row: jax.Array,
    source: KeySource,
    batch: AttnBatch,
    spec: AttnSpec,
    inputs: Mapping[str, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Return (out f32 [Hkv, queries, Dv], log-sum-exp) of one block of queries [Hkv, queries, D].

    Only chunks with visible keys are read.
    """
    kv_len = batch.kv_lens[row]
    end = jnp.minimum(kv_len, first + count) if spec.causal else kv_len
    begin = (
        jnp.zeros_like(first) if spec.window is None else jnp.maximum(first - spec.window + 1, 0)
    )

    def add(i: jax.Array, state: Partial) -> Partial:
        k, v, base = source.read(row, i)
        k, v = k.astype(block.dtype), v.astype(block.dtype)
        keys = base + jnp.arange(k.shape[1])
        # A chunk that would reach past the end of its row is moved back. Its first keys may then
        # belong to the chunk before.
        own = (keys >= i * source.size) & (keys < kv_len)
        visible = visible_keys(keys[None], positions[:, None], kv_len, spec) & own[None]
        products = batched_dot(block, k, (2, 2), 1)
        # Only if it is used: XLA:CPU fuses a chunk worse beside unused values, 8 % of a prompt.
        away = keys[None] - positions[:, None] if inputs else keys
        scores = scale_scores(products, away, visible, spec, inputs)
        return add_keys(state, scores, jnp.where(own[None, :, None], v, 0))

    state = jax.lax.fori_loop(
        begin // source.size, -(-end // source.size), add, empty_partial(block, spec.v_dim)
    )
    return finish(state, inputs)


def _merge(done: jax.Array, block: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    """Write the first `count` tokens of a block [Hkv, G, size, ...] into `done` at `start`.

    `done` is [Hkv, G, T + size, ...].
    """
    size = block.shape[2]
    old = jax.lax.dynamic_slice_in_dim(done, start, size, axis=2)
    chosen = (jnp.arange(size) < count).reshape(1, 1, size, *[1] * (block.ndim - 3))
    return jax.lax.dynamic_update_slice_in_dim(done, jnp.where(chosen, block, old), start, axis=2)


def _as_cached(x: jax.Array, layout: KVLayout) -> jax.Array:
    """Return new keys or values with what the cache will hold of them, so that a prompt gives the
    same result in one chunk and in several.
    """
    if layout.storage is None:
        return x.astype(layout.dtype)
    return narrowed(QUANTIZE[layout.storage](x).values(), layout.dtype)


def _fresh_keys(k: jax.Array, v: jax.Array, batch: AttnBatch, chunk: int) -> KeySource:
    """Return a source that reads the packed new k and v [T, Hkv, D]."""
    size = min(chunk, k.shape[0])
    k, v = (jnp.pad(x.transpose(1, 0, 2), ((0, 0), (0, size), (0, 0))) for x in (k, v))

    def read(row: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        start = batch.cu_q_lens[row] + i * size
        take = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size, axis=1
        )
        return take(k), take(v), i * size

    return KeySource(size, read)


def _cached_keys(cache: CacheArrays, batch: AttnBatch, layout: KVLayout, chunk: int) -> KeySource:
    """Return a source that reads the rows' pages.

    It gathers whole pages, or slices the page where a row is one page of layout hnd.
    """
    if layout.name == "hnd" and batch.bucket.pages_per_seq == 1:
        return _sliced_keys(cache, batch, layout, chunk)
    per_chunk = min(max(1, chunk // layout.page_size), batch.bucket.pages_per_seq)
    pages = jnp.pad(batch.page_table, ((0, 0), (0, per_chunk)))

    def read(row: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        chosen = jax.lax.dynamic_slice(pages, (row, i * per_chunk), (1, per_chunk))[0]
        size = per_chunk * layout.page_size
        k, v = (x.reshape(size, *x.shape[2:]).swapaxes(0, 1) for x in layout.read(cache, chosen))
        return k, v, i * size

    return KeySource(per_chunk * layout.page_size, read)


def _sliced_keys(cache: CacheArrays, batch: AttnBatch, layout: KVLayout, chunk: int) -> KeySource:
    capacity = layout.page_size
    size = min(chunk, capacity)
    page = dataclasses.replace(layout, num_pages=1, page_size=size)

    def read(row: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        base = jnp.minimum(i * size, capacity - size)
        at = (batch.page_table[row, 0], jnp.int32(0), base, jnp.int32(0))
        part = {
            n: jax.lax.dynamic_slice(array, at[: array.ndim], page.shapes()[n].shape)
            for n, array in cache.items()
        }
        k, v = page.read(part, jnp.int32(0))
        return k.swapaxes(0, 1), v.swapaxes(0, 1), base

    return KeySource(size, read)
