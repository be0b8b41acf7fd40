"""Attention over int8 keys and values. They are never converted to floats as a whole: the scales
multiply the scores and the weights of a running softmax.

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
from enginebay_third_party_layout.plugin import LAYOUT

LOWEST = -1e30
"""The running maximum before the first key. It is finite, so that differences are never NaN."""

KEY_CHUNK = 64
"""Keys of a chunk."""

CAPS = Caps(
    platforms=frozenset({"cpu"}),
    layouts=(LAYOUT,),
    q_dtypes=frozenset({"float32", "bfloat16"}),
    kv_dtypes=frozenset({"float32", "bfloat16"}),
    features=frozenset({"window", "shard_map"}),
    head_dim=lambda size: size % 16 == 0,
)


@dataclasses.dataclass(frozen=True)
class Int8Scan:
    """Processes one chunk of every token's keys at a time. The op kv_write writes new keys and
    values into the cache before, so k and v are None.
    """

    name: str = "int8_scan"
    version: str = "1"
    priority: int = 0
    caps: Caps = CAPS

    def default_config(self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout) -> None:
        """Return None: the kernel has no setting to tune."""

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
        config: None = None,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, CacheArrays, None]:
        """For q [T, Hq, D] return (out [T, Hq, D], the same cache, None)."""
        tokens = q.shape[0]
        row = jnp.minimum(batch.seq_ids, batch.bucket.seqs - 1)
        kv_lens = jnp.where(batch.seq_ids < batch.bucket.seqs, batch.kv_lens[row], 0)[:, None]
        last = batch.positions[:, None]
        queries = q.astype(jnp.float32).reshape(tokens, spec.num_kv_heads, spec.group, -1)
        queries = queries * spec.softmax_scale

        def add_chunk(
            seen: tuple[jax.Array, ...], start: jax.Array
        ) -> tuple[tuple[jax.Array, ...], None]:
            maximum, total, values = seen
            at = jnp.broadcast_to(start + jnp.arange(KEY_CHUNK), (tokens, KEY_CHUNK))
            page = jnp.minimum(at // layout.page_size, batch.bucket.pages_per_seq - 1)
            where = batch.page_table[row[:, None], page], at % layout.page_size
            chunk = {name: array[where].astype(jnp.float32) for name, array in cache.items()}
            visible = (at < kv_lens) & ((at <= last) | (not spec.causal))
            if spec.window is not None:
                visible &= at > last - spec.window
            seen_by_head = visible[:, None, None]
            # [tokens, kv_heads, 1, chunk]. Scales of slots that were never written may be NaN.
            k_scales, v_scales = (
                jnp.where(seen_by_head, jnp.swapaxes(chunk[name], 1, 2)[:, :, None], 0)
                for name in ("k_scales", "v_scales")
            )
            scores = jnp.einsum("thgd,tchd->thgc", queries, chunk["k"]) * k_scales
            scores = jnp.where(seen_by_head, scores, LOWEST)
            highest = jnp.maximum(maximum, scores.max(axis=-1))
            weights = jnp.where(seen_by_head, jnp.exp(scores - highest[..., None]), 0)
            shrink = jnp.exp(maximum - highest)
            part = jnp.einsum("thgc,tchd->thgd", weights * v_scales, chunk["v"])
            values = values * shrink[..., None] + part
            return (highest, total * shrink + weights.sum(axis=-1), values), None

        heads = queries.shape[:3]
        start = (jnp.full(heads, LOWEST), jnp.zeros(heads), jnp.zeros(queries.shape))
        starts = jnp.arange(0, batch.bucket.max_kv_len, KEY_CHUNK)
        (_, total, values), _ = jax.lax.scan(add_chunk, start, starts)
        out = values / jnp.maximum(total, 1e-30)[..., None]
        return out.reshape(q.shape).astype(q.dtype), cache, None


int8_scan = Int8Scan()
