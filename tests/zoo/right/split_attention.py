"""Attention as device kernels do it, in plain JAX: splits of the context, blocks of keys in two
buffers, parts merged.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.ops.caps import Caps, Env
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket

MASKED = -1e30
LOWEST = -5e29
CAPS = Caps(
    frozenset({"cpu"}),
    ("hnd", "nhd", "tpu_rpa"),
    modes=frozenset({"decode", "mixed"}),
    features=frozenset(
        {"window", "softcap", "sinks", "lse", "kv_share", "deterministic", "fused_write"}
    ),
    head_dim=lambda width: width <= 128,
)


@dataclasses.dataclass(frozen=True)
class SplitConfig:
    """Keys of a block, and parts of the context that are summed on their own."""

    block_kv: int = 32
    splits: int = 2


class Part(NamedTuple):
    """Softmax over some keys: maximum and sum of exponentials [T, Hkv, G], weighted values [T, Hkv,
    G, D], f32.
    """

    maximum: jax.Array
    total: jax.Array
    weighted: jax.Array


class Tokens(NamedTuple):
    """The step's tokens [T]: their rows, first and one past the last visible key, and whether they
    are real.
    """

    row: jax.Array
    first: jax.Array
    end: jax.Array
    real: jax.Array


@dataclasses.dataclass(frozen=True)
class SplitAttention:
    """See the module."""

    name: str = "split"
    version: str = "1"
    priority: int = 0
    caps: Caps = CAPS

    def default_config(
        self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
    ) -> SplitConfig:
        return SplitConfig()

    def candidates(
        self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
    ) -> list[SplitConfig]:
        return [SplitConfig(block, splits) for block in (16, 32, 64) for splits in (1, 2, 5)]

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
        config: SplitConfig,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, CacheArrays, jax.Array | None]:
        if k is not None and v is not None:
            cache = layout.write(cache, batch.slots, k, v)
        tokens = visible_range(batch, spec)
        shape = (q.shape[0], spec.num_kv_heads, spec.group, spec.head_dim)
        grouped = q.reshape(shape)
        read = functools.partial(read_block, cache, batch, layout, config.block_kv)
        blocks = -(-batch.bucket.pages_per_seq * layout.page_size // config.block_kv)
        share = -(-blocks // config.splits)
        parts = [
            one_split(grouped, tokens, read, split * share, (split + 1) * share, spec, config)
            for split in range(config.splits)
        ]
        merged = functools.reduce(merge, parts)
        out, lse = finish(merged, sinks, spec)
        out = jnp.where(tokens.real[:, None, None], out.reshape(q.shape), 0.0)
        return out.astype(q.dtype), cache, lse.reshape(q.shape[:2]) if spec.return_lse else None


def visible_range(batch: AttnBatch, spec: AttnSpec) -> Tokens:
    """Which keys each token looks at."""
    real = batch.seq_ids < batch.bucket.seqs
    row = jnp.minimum(batch.seq_ids, batch.bucket.seqs - 1)
    kv_len = batch.kv_lens[row]
    end = batch.positions + 1 if spec.causal else kv_len
    first = jnp.zeros_like(end)
    if spec.window is not None:
        first = jnp.maximum(batch.positions - spec.window + 1, 0)
    return Tokens(row, first, jnp.where(real, end, 0), real)


def read_block(
    cache: CacheArrays,
    batch: AttnBatch,
    layout: KVLayout,
    size: int,
    row: jax.Array,
    block: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """k, v [T, size, Hkv, D] of a block of each token's row; what lies past the table is that of
    its last page.
    """
    positions = block * size + jnp.arange(size)
    pages = jnp.minimum(positions // layout.page_size, batch.bucket.pages_per_seq - 1)
    slots = batch.page_table[row][:, pages] * layout.page_size + positions % layout.page_size
    k, v = layout.read_tokens(cache, slots.reshape(-1))
    return tuple(x.reshape(*slots.shape, *x.shape[1:]) for x in (k, v))


def one_split(
    q: jax.Array,
    tokens: Tokens,
    read: Any,
    start: int,
    stop: int,
    spec: AttnSpec,
    config: SplitConfig,
) -> Part:
    """The part of blocks start to stop: a block is loaded into one buffer while the other is
    computed.
    """
    k, v = read(tokens.row, jnp.int32(start))
    buffers = (jnp.stack([k, jnp.zeros_like(k)]), jnp.stack([v, jnp.zeros_like(v)]))

    def step(i: jax.Array, state: Any) -> Any:
        part, (keys, values) = state
        here, other = (i - start) % 2, (i - start + 1) % 2
        k, v = keys[here], values[here]
        next_k, next_v = read(tokens.row, i + 1)
        keys, values = keys.at[other].set(next_k), values.at[other].set(next_v)
        return add_block(part, q, k, v, i * config.block_kv, tokens, spec), (keys, values)

    return jax.lax.fori_loop(start, stop, step, (empty(q), buffers))[0]


def empty(q: jax.Array) -> Part:
    """No key seen yet."""
    maximum = jnp.full(q.shape[:-1], LOWEST, jnp.float32)
    return Part(maximum, jnp.zeros_like(maximum), jnp.zeros(q.shape, jnp.float32))


def add_block(
    part: Part,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    base: jax.Array,
    tokens: Tokens,
    spec: AttnSpec,
) -> Part:
    """The part with the keys of one block, of which the first is at position `base`."""
    positions = base + jnp.arange(k.shape[1])
    visible = (positions >= tokens.first[:, None]) & (positions < tokens.end[:, None])
    precision = jax.lax.Precision.HIGHEST
    products = jnp.einsum(
        "thgd,tbhd->thgb", q, k, precision=precision, preferred_element_type=jnp.float32
    )
    scores = products * spec.softmax_scale
    if spec.softcap is not None:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    scores = jnp.where(visible[:, None, None], scores, MASKED)
    v = jnp.where(visible[:, :, None, None], v, 0)
    maximum = jnp.maximum(part.maximum, scores.max(axis=-1))
    weights = jnp.exp(scores - maximum[..., None])
    keep = jnp.exp(part.maximum - maximum)
    values = jnp.einsum(
        "thgb,tbhd->thgd",
        weights.astype(v.dtype),
        v,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    total = part.total * keep + weights.sum(axis=-1)
    return Part(maximum, total, part.weighted * keep[..., None] + values)


def merge(one: Part, other: Part) -> Part:
    """Two parts of the same queries as one."""
    maximum = jnp.maximum(one.maximum, other.maximum)
    left, right = jnp.exp(one.maximum - maximum), jnp.exp(other.maximum - maximum)
    total = one.total * left + other.total * right
    weighted = one.weighted * left[..., None] + other.weighted * right[..., None]
    return Part(maximum, total, weighted)


def finish(part: Part, sinks: jax.Array | None, spec: AttnSpec) -> tuple[jax.Array, jax.Array]:
    """(output, log-sum-exp), a sink being a score without a value."""
    if sinks is not None:
        sink = sinks.reshape(spec.num_kv_heads, spec.group).astype(jnp.float32)
        zeros = jnp.zeros_like(part.weighted)
        part = merge(
            part, Part(jnp.broadcast_to(sink, part.maximum.shape), jnp.ones_like(part.total), zeros)
        )
    total = jnp.where(part.total == 0, 1.0, part.total)
    return part.weighted / total[..., None], part.maximum + jnp.log(total)


attention = SplitAttention()
