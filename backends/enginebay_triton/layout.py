"""The cache layout of GPU kernels."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from enginebay.cache import CacheArrays, KVLayout


@dataclasses.dataclass(frozen=True)
class NhdLayout(KVLayout):
    """kv [pages, page_size, kv_heads, 2, head_dim]: the key of a head is followed by its value.

    Where the values are a prefix of the keys, only keys are stored:
    [pages, page_size, kv_heads, 1, head_dim].
    """

    offset_axis: ClassVar[int] = 1
    serves_v_prefix: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "nhd"

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        parts = 1 if self.v_prefix_dim else 2
        shape = (self.num_pages, self.page_size, self.num_kv_heads, parts, self.head_dim)
        return {"kv": jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))}

    def head_axis(self) -> dict[str, int]:
        return {"kv": 2}

    def write(
        self, cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array
    ) -> dict[str, jax.Array]:
        pages, offsets = self.split_slots(slots)
        new = jnp.stack([k] if self.v_prefix_dim else [k, v], axis=2).astype(self.dtype)
        return {"kv": cache["kv"].at[pages, offsets].set(new, mode="drop")}

    def read(self, cache: CacheArrays, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._pair(cache["kv"][pages])

    def read_tokens(self, cache: CacheArrays, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._pair(cache["kv"][self.split_slots(slots)])

    def _pair(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        k = rows[..., 0, :]
        return k, k[..., : self.v_prefix_dim] if self.v_prefix_dim else rows[..., 1, :]
