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
    """kv [pages, page_size, 2 * kv_heads / packing, packing, head_dim rounded up to 128].

    Key heads and value heads alternate. `packing` is how many values share a 32-bit word, so that a
    page is a whole number of TPU tiles. Where the values are a prefix of the keys, only keys are
    stored: [pages, page_size, kv_heads, packing, lanes]. Each key is then cut into `packing` pieces
    of equal length, and a word has one value of each piece.
    """

    offset_axis: ClassVar[int] = 1
    serves_v_prefix: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "tpu_rpa"

    @property
    def packing(self) -> int:
        """Values per 32-bit word."""
        return 4 // jnp.dtype(self.dtype).itemsize

    @property
    def padded_head_dim(self) -> int:
        """The width of a row: head_dim, or the length of a piece of a key, rounded up to 128."""
        width = -(-self.head_dim // self.packing) if self.v_prefix_dim else self.head_dim
        return -(-width // TPU_LANES) * TPU_LANES

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        pairs = (
            self.num_kv_heads if self.v_prefix_dim else -(-2 * self.num_kv_heads // self.packing)
        )
        shape = (self.num_pages, self.page_size, pairs, self.packing, self.padded_head_dim)
        return {"kv": jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))}

    def head_axis(self) -> dict[str, int]:
        return {"kv": 2}

    def write(
        self, cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array
    ) -> dict[str, jax.Array]:
        new = self.packed(k, v).astype(self.dtype)
        return {"kv": cache["kv"].at[self.split_slots(slots)].set(new, mode="drop")}

    def packed(self, k: jax.Array, v: jax.Array) -> jax.Array:
        """Return keys and values [tokens, kv_heads, width] as [tokens, pairs, packing, lanes].

        That is the form of a token in the cache; padding is zero.
        """
        shape = (k.shape[0], *self.shapes()["kv"].shape[2:])
        if self.v_prefix_dim:
            missing = shape[2] * shape[3] - self.head_dim
            return jnp.pad(k, ((0, 0), (0, 0), (0, missing))).reshape(shape)
        heads = jnp.stack([k, v], axis=2).reshape(shape[0], 2 * self.num_kv_heads, self.head_dim)
        missing = shape[1] * shape[2] - heads.shape[1]
        heads = jnp.pad(heads, ((0, 0), (0, missing), (0, shape[3] - self.head_dim)))
        return heads.reshape(shape)

    def read(self, cache: CacheArrays, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._split_heads(cache["kv"][pages])

    def read_tokens(self, cache: CacheArrays, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._split_heads(cache["kv"][self.split_slots(slots)])

    def _split_heads(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        if self.v_prefix_dim:
            k = rows.reshape(*rows.shape[:-2], -1)[..., : self.head_dim]
            return k, k[..., : self.v_prefix_dim]
        heads = rows.reshape(*rows.shape[:-3], -1, rows.shape[-1])[
            ..., : 2 * self.num_kv_heads, : self.head_dim
        ]
        return heads[..., 0::2, :], heads[..., 1::2, :]
