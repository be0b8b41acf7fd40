"""The op kv_write in the layout int8_heads: keys and values are rounded in one pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay_third_party_layout.layout import quantize


def kv_write(
    cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array, *, layout: KVLayout
) -> dict[str, jax.Array]:
    """Write k and v [T, kv_heads, head_dim] to slots int32 [T]; negative slots are dropped.
    KvWriteOp describes the op.
    """
    values, scales = quantize(jnp.stack([k, v]))
    new = {"k": values[0], "v": values[1], "k_scales": scales[0], "v_scales": scales[1]}
    where = layout.split_slots(slots)
    return {name: cache[name].at[where].set(rows, mode="drop") for name, rows in new.items()}
