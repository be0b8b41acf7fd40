"""The cache layout of XLA on CPU, and of cuDNN."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from enginebay.cache import CacheArrays, KVLayout


@dataclasses.dataclass(frozen=True)
class HndLayout(KVLayout):
    """k, v [pages, kv_heads, page_size, head_dim]: each head's keys lie together. Fastest for XLA
    on CPU, and cuDNN's.
    """

    offset_axis: ClassVar[int] = 2

    @property
    def name(self) -> str:
        return "hnd"

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        shape = (self.num_pages, self.num_kv_heads, self.page_size, self.head_dim)
        return {n: jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype)) for n in ("k", "v")}

    def head_axis(self) -> dict[str, int]:
        return {"k": 1, "v": 1}

    def write(
        self, cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array
    ) -> dict[str, jax.Array]:
        pages, offsets = self.split_slots(slots)
        new = {"k": k, "v": v}
        return {
            n: cache[n].at[pages, :, offsets].set(new[n].astype(self.dtype), mode="drop")
            for n in new
        }

    def read(self, cache: CacheArrays, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.swapaxes(cache["k"][pages], -3, -2), jnp.swapaxes(cache["v"][pages], -3, -2)

    def read_tokens(self, cache: CacheArrays, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        pages, offsets = self.split_slots(slots)
        return cache["k"][pages, :, offsets], cache["v"][pages, :, offsets]
