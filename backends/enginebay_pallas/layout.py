"""The cache layout of TPU kernels."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from enginebay.cache import CacheArrays, KVLayout

TPU_LANES = 128


@dataclasses.dataclass(frozen=True)
class TpuRpaLayout(KVLayout):
    """kv [pages, page_size, 2 * kv_heads / packing, packing, head_dim rounded up to 128], K and V
    heads in turn.

    `packing` is how many values share a 32-bit word, so that a page is a whole number of TPU tiles.
    """

    offset_axis: ClassVar[int] = 1

    @property
    def name(self) -> str:
        return "tpu_rpa"

    @property
    def packing(self) -> int:
        """Values per 32-bit word."""
        return 4 // jnp.dtype(self.dtype).itemsize

    @property
    def padded_head_dim(self) -> int:
        """head_dim rounded up to whole lanes."""
        return -(-self.head_dim // TPU_LANES) * TPU_LANES

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        pairs = -(-2 * self.num_kv_heads // self.packing)
        shape = (self.num_pages, self.page_size, pairs, self.packing, self.padded_head_dim)
        return {"kv": jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))}

    def head_axis(self) -> dict[str, int]:
        return {"kv": 2}

    def write(
        self, cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array
    ) -> dict[str, jax.Array]:
        pages, offsets = self.split_slots(slots)
        tokens = k.shape[0]
        _, _, pairs, packing, width = self.shapes()["kv"].shape
        heads = jnp.stack([k, v], axis=2).reshape(tokens, 2 * self.num_kv_heads, self.head_dim)
        heads = jnp.pad(
            heads, ((0, 0), (0, pairs * packing - heads.shape[1]), (0, width - self.head_dim))
        )
        new = heads.reshape(tokens, pairs, packing, width).astype(self.dtype)
        return {"kv": cache["kv"].at[pages, offsets].set(new, mode="drop")}

    def read(self, cache: CacheArrays, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._split_heads(cache["kv"][pages])

    def read_tokens(self, cache: CacheArrays, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._split_heads(cache["kv"][self.split_slots(slots)])

    def _split_heads(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        heads = rows.reshape(*rows.shape[:-3], -1, rows.shape[-1])[
            ..., : 2 * self.num_kv_heads, : self.head_dim
        ]
        return heads[..., 0::2, :], heads[..., 1::2, :]
