"""The cache layout of TPU kernels."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.errors import UnsupportedError
from enginebay.ops.kv_storage import (
    KV_STORAGES,
    QUANTIZE,
    SCALE_DTYPE,
    TOLERANCES,
    VALUE_DTYPES,
    ZERO_DTYPE,
    QuantizedHeads,
    narrowed,
    pack_halves,
    pack_nibbles,
    unpack_halves,
    unpack_nibbles,
)

TPU_LANES = 128


@dataclasses.dataclass(frozen=True)
class TpuRpaLayout(KVLayout):
    """kv [pages, page_size, 2 * kv_heads / packing, packing, head_dim rounded up to 128].

    Key heads and value heads alternate. `packing` is how many values share a 32-bit word, so that a
    page is a whole number of TPU tiles. Where the values are a prefix of the keys, only keys are
    stored: [pages, page_size, kv_heads, packing, lanes]. Each key is then cut into `packing` pieces
    of equal length, and a word has one value of each piece.

    With a `storage`, kv holds codes, and kv_scales [pages, 2 * kv_heads, page_size] has the scales
    of key heads and value heads in turn, in bfloat16. Tokens are its last axis, because a TPU pads
    the last axis to 128, and because a kernel multiplies a row of scores by a row of scales.
    `uint4` also has zero points kv_zeros of the same shape in int16. A byte of `uint4` has the
    key's code in its low and the value's code in its high four bits, so kv is [pages, page_size,
    kv_heads / 4, 4, lanes]. Where only keys are stored, codes i and i + ceil(head_dim / 2) share a
    byte, these bytes are cut into pieces, and kv_scales is [pages, 1, page_size].
    """

    offset_axis: ClassVar[int] = 1
    serves_v_prefix: ClassVar[bool] = True
    storages: ClassVar[frozenset[str]] = KV_STORAGES

    @property
    def name(self) -> str:
        return "tpu_rpa"

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.storage] if self.storage else 0.0

    @property
    def value_dtype(self) -> jnp.dtype[Any]:
        """The dtype of the array kv."""
        return VALUE_DTYPES[self.storage] if self.storage else jnp.dtype(self.dtype)

    @property
    def packing(self) -> int:
        """Numbers of kv per 32-bit word."""
        return 4 // self.value_dtype.itemsize

    @property
    def num_scales(self) -> int:
        """Number of scales of a token."""
        return self.num_kv_heads * (1 if self.v_prefix_dim else 2)

    @property
    def padded_head_dim(self) -> int:
        """The width of a row: head_dim, or the length of a piece of a key, rounded up to 128."""
        return -(-self.head_dim // (self._pieces * TPU_LANES)) * TPU_LANES

    @property
    def _pieces(self) -> int:
        """Values of a head that share a lane: where only keys are stored, a key is cut."""
        return self.packing * (1 + (self.storage == "uint4")) if self.v_prefix_dim else 1

    @property
    def _token_shape(self) -> tuple[int, int, int]:
        """Shape of a token in kv."""
        heads = self.num_kv_heads
        if not self.v_prefix_dim:
            rows = heads if self.storage == "uint4" else 2 * heads
            heads = -(-rows // self.packing)
        return heads, self.packing, self.padded_head_dim

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        shape = (self.num_pages, self.page_size, *self._token_shape)
        found = {"kv": jax.ShapeDtypeStruct(shape, self.value_dtype)}
        scales = (self.num_pages, self.num_scales, self.page_size)
        if self.storage:
            found["kv_scales"] = jax.ShapeDtypeStruct(scales, SCALE_DTYPE)
        if self.storage == "uint4":
            found["kv_zeros"] = jax.ShapeDtypeStruct(scales, ZERO_DTYPE)
        return found

    def head_axis(self) -> dict[str, int]:
        return {name: 2 if name == "kv" else 1 for name in self.shapes()}

    def offset_axis_of(self, array: str) -> int:
        return self.offset_axis if array == "kv" else 2

    def per_shard(self, num_shards: int) -> Self:
        rows = self.num_kv_heads * (1 if self.storage == "uint4" else 2)
        if num_shards > 1 and not self.v_prefix_dim and rows % (num_shards * self.packing):
            each = self.packing * self.num_kv_heads // rows
            raise UnsupportedError(
                f"a {self.storage or self.dtype} cache with {self.num_kv_heads} KV heads in layout "
                f"{self.name}, split over {num_shards} devices",
                f"a multiple of {each} KV heads on each device",
                "Use fewer devices, or another dtype of the cache.",
            )
        return super().per_shard(num_shards)

    def stored(self, k: jax.Array, v: jax.Array) -> dict[str, jax.Array]:
        """Return k and v [tokens, kv_heads, width] as the arrays store them: kv [tokens, pairs,
        packing, lanes], where padding is 0, and with a `storage` kv_scales [tokens, num_scales].
        """
        rows = (k if self.v_prefix_dim else jnp.stack([k, v], axis=2)).reshape(
            k.shape[0], -1, self.head_dim
        )
        is_cut = self.v_prefix_dim is not None
        if self.storage is None:
            return {"kv": _as_words(rows.astype(self.dtype), self._token_shape, cut=is_cut)}
        heads = QUANTIZE[self.storage](rows)
        codes = heads.codes
        if self.storage == "uint4" and self.v_prefix_dim:
            codes = pack_halves(codes)
        elif self.storage == "uint4":
            codes = pack_nibbles(codes[:, 0::2], codes[:, 1::2])
        found = {"kv": _as_words(codes, self._token_shape, cut=is_cut), "kv_scales": heads.scales}
        return found if heads.zeros is None else {**found, "kv_zeros": heads.zeros}

    def packed(self, k: jax.Array, v: jax.Array) -> jax.Array:
        """Return the array kv of `stored`, for a layout without `storage`."""
        return self.stored(k, v)["kv"]

    def write(
        self, cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array
    ) -> dict[str, jax.Array]:
        pages, offsets = self.split_slots(slots)
        written: dict[str, jax.Array] = {}
        for name, new in self.stored(k, v).items():
            where = (pages, offsets) if name == "kv" else (pages, slice(None), offsets)
            written[name] = cache[name].at[where].set(new, mode="drop")
        return written

    def read(self, cache: CacheArrays, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = {name: array[pages] for name, array in cache.items()}
        return self._pair(
            {n: x if n == "kv" else jnp.swapaxes(x, -2, -1) for n, x in found.items()}
        )

    def read_tokens(self, cache: CacheArrays, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v = self.read_exact(cache, slots)
        return narrowed(k, self.dtype), narrowed(v, self.dtype)

    def read_exact(self, cache: CacheArrays, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        pages, offsets = self.split_slots(slots)
        found = {
            name: array[pages, offsets] if name == "kv" else array[pages, :, offsets]
            for name, array in cache.items()
        }
        return self._pair(found, "float32")

    def _pair(self, found: CacheArrays, dtype: str | None = None) -> tuple[jax.Array, jax.Array]:
        """Return keys and values of tokens in `dtype`, or in that of the layout."""
        dtype, words = dtype or self.dtype, found["kv"]
        if self.v_prefix_dim:
            rows = words.reshape(*words.shape[:-2], -1)
        else:
            rows = words.reshape(*words.shape[:-3], -1, words.shape[-1])
        if self.storage == "uint4" and self.v_prefix_dim:
            half = -(-self.head_dim // 2)
            rows = unpack_halves(rows[..., :half], self.head_dim)
        elif self.storage == "uint4":
            rows = jnp.stack(unpack_nibbles(rows[..., : self.num_kv_heads, :]), axis=-2)
            rows = rows.reshape(*rows.shape[:-3], -1, rows.shape[-1])
        rows = rows[..., : self.num_scales, : self.head_dim]
        if self.storage:
            heads = QuantizedHeads(rows, found["kv_scales"], found.get("kv_zeros"))
            rows = narrowed(heads.values(), dtype)
        rows = rows.astype(dtype)
        if self.v_prefix_dim:
            return rows, rows[..., : self.v_prefix_dim]
        return rows[..., 0::2, :], rows[..., 1::2, :]


def _as_words(rows: jax.Array, shape: tuple[int, int, int], *, cut: bool) -> jax.Array:
    """Return rows [tokens, rows, width] as [tokens, *shape], where shape is (heads, packing,
    lanes); padding is 0. `cut`: each row becomes `packing` pieces.
    """
    tokens, count, width = rows.shape
    heads, packing, lanes = shape
    if cut:
        missing = ((0, 0), (0, 0), (0, packing * lanes - width))
    else:
        missing = ((0, 0), (0, heads * packing - count), (0, lanes - width))
    return jnp.pad(rows, missing).reshape(tokens, *shape)
