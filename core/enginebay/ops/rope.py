"""The ops rope and rope_kv_write: rotary positions of queries and keys, and the fused write to the
cache.
"""

from __future__ import annotations

from typing import Protocol

import jax

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.ops.op import CLOSE, Op
from enginebay.ops.rotary import RopeSpec

ANGLES = {**CLOSE, "float32": 1e-3}
"""Tolerance of rope: the rounding error of an f32 angle of thousands of radians."""


class RopeOp(Protocol):
    """Rotates the first rotary_dim features of x [T, heads, head_dim] to positions int32 [T]."""

    def __call__(self, x: jax.Array, positions: jax.Array, *, spec: RopeSpec) -> jax.Array: ...


class RopeKvWriteOp(Protocol):
    """Rotates q [T, q_heads, head_dim] and k [T, kv_heads, head_dim], and writes k and v [T,
    kv_heads, head_dim] to the cache. Returns (rotated q, updated cache).

    A fused op of rope and kv_write, used with attention that does not write the cache itself.
    positions and slots are int32 [T]. Tokens with a negative slot are not written. The capability
    `layouts` of an implementation lists its cache layouts; without it, all layouts.
    """

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: CacheArrays,
        positions: jax.Array,
        slots: jax.Array,
        *,
        spec: RopeSpec,
        layout: KVLayout,
    ) -> tuple[jax.Array, CacheArrays]: ...


ROPE: Op[RopeOp] = Op(
    "rope",
    RopeOp,
    "enginebay_xla.rope:rope",
    "enginebay_xla.quick_cases:rope_cases",
    ANGLES,
    kit="enginebay_xla.kit.kits:ROPE",
    bench="enginebay_xla.bench.plain:ROPE",
    cost="enginebay_xla.cost:rope_cost",
    oracle="enginebay_testing.oracle:rope",
)


ROPE_KV_WRITE: Op[RopeKvWriteOp] = Op(
    "rope_kv_write",
    RopeKvWriteOp,
    "enginebay_xla.rope_kv_write:rope_kv_write",
    "enginebay_xla.quick_cases:rope_kv_write_cases",
    ANGLES,
    made_of=("rope", "kv_write"),
    composed="enginebay_xla.rope_kv_write:composed_rope_kv_write",
    kit="enginebay_xla.kit.kits:ROPE_KV_WRITE",
    bench="enginebay_xla.bench.fused:ROPE_KV_WRITE",
    cost="enginebay_xla.cost:rope_kv_write_cost",
)
