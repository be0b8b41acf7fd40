"""The op rope_kv_write in plain JAX: rope of queries and keys, then kv_write."""

from __future__ import annotations

import jax

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.ops.kv_write import KvWriteOp
from enginebay.ops.rope import RopeKvWriteOp, RopeOp
from enginebay.ops.rotary import RopeSpec
from enginebay_xla.kv_write import kv_write
from enginebay_xla.rope import rope


def composed_rope_kv_write(rope: RopeOp, kv_write: KvWriteOp) -> RopeKvWriteOp:
    """Return the op rope_kv_write made of the ops rope and kv_write."""

    def rope_kv_write(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: CacheArrays,
        positions: jax.Array,
        slots: jax.Array,
        *,
        spec: RopeSpec,
        layout: KVLayout,
    ) -> tuple[jax.Array, CacheArrays]:
        cache = kv_write(cache, slots, rope(k, positions, spec=spec), v, layout=layout)
        return rope(q, positions, spec=spec), cache

    return rope_kv_write


rope_kv_write = composed_rope_kv_write(rope, kv_write)
