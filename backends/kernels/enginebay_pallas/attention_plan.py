"""Static parameters of a call of ragged paged attention, and the blocks that each unit reads."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from enginebay.ops.spec import AttnSpec


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """Static parameters of one call.

    `rows` counts the query rows of a KV head in a unit of `block_q` tokens. With `one_token` each
    unit is a row's only new token. With `no_prefix` new keys and values are given and written. With
    `is_wide` outputs are f32 and come with their log-sum-exp. `storage` is that of a quantised
    cache, which the kernel does not write.
    """

    spec: AttnSpec
    page_size: int
    pages_per_seq: int
    block_q: int
    rows: int
    block_kv: int
    chunk_kv: int
    vmem_limit_bytes: int
    one_token: bool
    no_prefix: bool
    is_wide: bool
    unroll_heads: int
    storage: str | None
    is_interpreted: bool


class PlanTables(NamedTuple):
    """Scalar-prefetched int32 arrays: Units.rows, Units.first, and arrays of the batch.

    page_table is flat.
    """

    unit_rows: Any
    unit_first: Any
    cu_q_lens: Any
    kv_lens: Any
    page_table: Any


class Span(NamedTuple):
    """The blocks that a unit reads: `num_cached` of pages, then `num_fresh` of new tokens.

    The first block of pages is `first_cached`. Queries see keys from position `begin` to `end` - 1.
    """

    row: Any
    start: Any
    q_len: Any
    kv_len: Any
    position: Any
    begin: Any
    end: Any
    cached: Any
    first_cached: Any
    num_cached: Any
    first_fresh: Any
    num_fresh: Any

    @property
    def num_blocks(self) -> Any:
        """Blocks of pages and of new tokens together."""
        return self.num_cached + self.num_fresh


def blocks_of(tokens: Any, size: int) -> Any:
    """Return the number of blocks of `size` that hold `tokens` tokens."""
    return lax.div(tokens + (size - 1), jnp.int32(size))


def span_of(plan: AttentionPlan, tables: PlanTables, unit: Any) -> Span:
    """Return the blocks that a unit reads; a unit without work reads none."""
    spec, size = plan.spec, plan.block_kv
    real = tables.unit_rows[unit] >= 0
    row = jnp.maximum(tables.unit_rows[unit], 0)
    start, kv_len = tables.cu_q_lens[row], tables.kv_lens[row]
    q_len = jnp.int32(1) if plan.one_token else tables.cu_q_lens[row + 1] - start
    before = kv_len - q_len
    position = before + tables.unit_first[unit]
    end = jnp.minimum(position + plan.block_q, kv_len) if spec.causal else kv_len
    begin = jnp.int32(0) if spec.window is None else jnp.maximum(position - (spec.window - 1), 0)
    apart = plan.no_prefix and not plan.one_token
    cached = jnp.minimum(before if apart else kv_len, end)
    first_cached = lax.div(begin, jnp.int32(size))
    num_cached = jnp.where(real, jnp.maximum(blocks_of(cached, size) - first_cached, 0), 0)
    first_fresh = num_fresh = jnp.int32(0)
    if apart:
        first_fresh = lax.div(jnp.maximum(begin - before, 0), jnp.int32(size))
        num_fresh = jnp.where(real, blocks_of(end - before, size) - first_fresh, 0)
    return Span(
        row=row,
        start=start,
        q_len=q_len,
        kv_len=kv_len,
        position=position,
        begin=begin,
        end=end,
        cached=cached,
        first_cached=first_cached,
        num_cached=num_cached,
        first_fresh=first_fresh,
        num_fresh=num_fresh,
    )


def place_of_block(plan: AttentionPlan, span: Span, step: Any) -> tuple[Any, Any]:
    """Return (first position of the block of a step, position after its last key)."""
    base = (span.first_cached + step) * plan.block_kv
    if not plan.no_prefix or plan.one_token:
        return base, span.cached
    fresh = span.kv_len - span.q_len + (span.first_fresh + step - span.num_cached) * plan.block_kv
    is_cached = step < span.num_cached
    return jnp.where(is_cached, base, fresh), jnp.where(is_cached, span.cached, span.end)
