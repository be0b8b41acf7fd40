"""The op kv_write: new keys and values to their slots of the cache."""

from __future__ import annotations

from typing import Protocol

import jax

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.ops.op import Op


class KvWriteOp(Protocol):
    """Writes k and v [T, kv_heads, head_dim] at slots int32 [T] of the cache, in place when it is
    donated. Tokens with a negative slot are dropped.

    An implementation lists its cache layouts in the capability `layouts`; without it, all layouts.
    """

    def __call__(
        self, cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array, *, layout: KVLayout
    ) -> CacheArrays: ...


KV_WRITE: Op[KvWriteOp] = Op(
    "kv_write",
    KvWriteOp,
    "enginebay_xla.kv_write:kv_write",
    "enginebay_xla.quick_cases:kv_write_cases",
    {},
    kit="enginebay_xla.kit.kits:KV_WRITE",
    bench="enginebay_xla.bench.plain:KV_WRITE",
    cost="enginebay_xla.cost:kv_write_cost",
)
