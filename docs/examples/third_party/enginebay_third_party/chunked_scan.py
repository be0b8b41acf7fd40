"""Attention as a scan over chunks of keys. Each token keeps a running maximum, a running sum and a
running weighted value.

The online softmax is that of Milakov and Gimelshein, "Online normalizer calculation for softmax"
(2018).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.ops.caps import Caps, Env
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket

LOWEST = -1e30
"""The running maximum before the first key. It is finite, so that differences are never NaN."""

KEY_CHUNKS = (16, 32, 64, 128, 256, 512)
WORKING_BYTES = 1 << 30

CAPS = Caps(
    platforms=frozenset({"cpu"}),
    layouts=("hnd", "nhd"),
    features=frozenset({"window", "lse", "deterministic", "shard_map"}),
)


@dataclasses.dataclass(frozen=True)
class ChunkConfig:
    """The setting that can be tuned: the number of keys in a chunk."""

    key_chunk: int = 64


@dataclasses.dataclass(frozen=True)
class ChunkedScan:
    """Processes one chunk of every row's keys at a time. Its working memory has tokens * key_chunk
    * KV heads * head_dim numbers.

    The kernel has no softcap, no sinks and no shared keys. Its capabilities declare this, so
    enginebay does not choose it for a model that needs one of these. The op kv_write writes new
    keys and values into the cache before, so k and v are None.
    """

    name: str = "chunked_scan"
    version: str = "1"
    priority: int = -10
    caps: Caps = CAPS

    def default_config(
        self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
    ) -> ChunkConfig:
        """Return chunks of at most a page and at most 64 keys."""
        return ChunkConfig(key_chunk=min(64, layout.page_size))

    def candidates(
        self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
    ) -> list[ChunkConfig]:
        """Return the sizes for `enginebay tune`: chunks up to the context, with keys and values in
        f32 within WORKING_BYTES.
        """
        of_a_key = 2 * 4 * bucket.tokens * spec.num_kv_heads * spec.head_dim
        return [
            ChunkConfig(size)
            for size in KEY_CHUNKS
            if size < 2 * bucket.max_kv_len and size * of_a_key <= WORKING_BYTES
        ]

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        cache: CacheArrays,
        batch: AttnBatch,
        *,
        spec: AttnSpec,
        layout: KVLayout,
        config: ChunkConfig,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, CacheArrays, jax.Array | None]:
        """For q [T, Hq, D] return (out [T, Hq, D], cache, log-sum-exp f32 [T, Hq] or None)."""
        size = config.key_chunk
        tokens, kv_heads, group = q.shape[0], spec.num_kv_heads, spec.group
        row = jnp.minimum(batch.seq_ids, batch.bucket.seqs - 1)
        kv_lens = jnp.where(batch.seq_ids < batch.bucket.seqs, batch.kv_lens[row], 0)[:, None]
        last = batch.positions[:, None]
        queries = q.astype(jnp.float32).reshape(tokens, kv_heads, group, -1) * spec.softmax_scale

        def add_chunk(
            seen: tuple[jax.Array, ...], start: jax.Array
        ) -> tuple[tuple[jax.Array, ...], None]:
            maximum, total, values = seen
            at = jnp.broadcast_to(start + jnp.arange(size), (tokens, size))
            pages = batch.page_table[
                row[:, None], jnp.minimum(at // layout.page_size, batch.bucket.pages_per_seq - 1)
            ]
            keys, chunk = layout.read_tokens(
                cache, (pages * layout.page_size + at % layout.page_size).reshape(-1)
            )
            visible = (at < kv_lens) & ((at <= last) | (not spec.causal))
            if spec.window is not None:
                visible &= at > last - spec.window
            keys, chunk = (
                x.astype(jnp.float32).reshape(tokens, size, kv_heads, -1) for x in (keys, chunk)
            )
            # A slot that was never written may hold NaN.
            chunk = jnp.where(visible[:, :, None, None], chunk, 0)
            scores = jnp.where(
                visible[:, None, None], jnp.einsum("thgd,tchd->thgc", queries, keys), LOWEST
            )
            highest = jnp.maximum(maximum, scores.max(axis=-1))
            weights = jnp.where(visible[:, None, None], jnp.exp(scores - highest[..., None]), 0)
            shrink = jnp.exp(maximum - highest)
            values = values * shrink[..., None] + jnp.einsum("thgc,tchd->thgd", weights, chunk)
            return (highest, total * shrink + weights.sum(axis=-1), values), None

        rows = queries.shape[:3]
        start = (jnp.full(rows, LOWEST), jnp.zeros(rows), jnp.zeros(queries.shape))
        starts = jnp.arange(0, batch.bucket.max_kv_len, size)
        (maximum, total, values), _ = jax.lax.scan(add_chunk, start, starts)
        out = jnp.where(total[..., None] > 0, values / jnp.maximum(total, 1e-30)[..., None], 0)
        lse = jnp.where(total > 0, maximum + jnp.log(jnp.maximum(total, 1e-30)), -jnp.inf)
        lse = lse.reshape(tokens, -1) if spec.return_lse else None
        return out.reshape(q.shape).astype(q.dtype), cache, lse


chunked_scan = ChunkedScan()
