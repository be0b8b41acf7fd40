"""The op kv_write in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays, KVLayout


def kv_write(
    cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array, layout: KVLayout
) -> CacheArrays:
    """Write k and v [T, kv_heads, head_dim] to slots int32 [T]; negative slots are dropped.

    A donated cache is changed in place.
    """
    if slots.shape[0] == 1:
        # XLA:CPU rewrites a scatter of one token into a dynamic-update-slice and fuses it into
        # every reader of the cache, which then copies the cache; with a second, dropped token it
        # stays one scatter in place.
        slots = jnp.concatenate([slots, jnp.full_like(slots, -1)])
        k, v = jnp.concatenate([k, k]), jnp.concatenate([v, v])
    return layout.write(cache, slots, k, v)
