"""The cache layout that XLA on CPUs and cuDNN read fastest."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from enginebay.cache import CacheArrays, KVLayout


@dataclasses.dataclass(frozen=True)
class HndLayout(KVLayout):
    """k, v [pages, kv_heads, page_size, head_dim]: the keys of a head lie together.

    Where the values are a prefix of the keys there is no array v.
    """

    offset_axis: ClassVar[int] = 2
    serves_v_prefix: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "hnd"

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        shape = (self.num_pages, self.num_kv_heads, self.page_size, self.head_dim)
        return {n: jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype)) for n in self._names}

    @property
    def _names(self) -> str:
        return "k" if self.v_prefix_dim else "kv"

    def head_axis(self) -> dict[str, int]:
        return dict.fromkeys(self._names, 1)

    def write(
        self, cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array
    ) -> dict[str, jax.Array]:
        pages, offsets = self.split_slots(slots)
        new = {"k": k, "v": v}
        return {
            n: cache[n].at[pages, :, offsets].set(new[n].astype(self.dtype), mode="drop")
            for n in self._names
        }

    def read(self, cache: CacheArrays, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._pair({n: jnp.swapaxes(cache[n][pages], -3, -2) for n in self._names})

    def read_tokens(self, cache: CacheArrays, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        pages, offsets = self.split_slots(slots)
        return self._pair({n: cache[n][pages, :, offsets] for n in self._names})

    def _pair(self, found: CacheArrays) -> tuple[jax.Array, jax.Array]:
        """Return keys and values; the values are columns of the keys where there is no array v."""
        return found["k"], found["v"] if "v" in found else found["k"][..., : self.v_prefix_dim]
