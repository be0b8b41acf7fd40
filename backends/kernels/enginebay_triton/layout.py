"""The cache layout of GPU kernels."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays, KVLayout
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


@dataclasses.dataclass(frozen=True)
class NhdLayout(KVLayout):
    """kv [pages, page_size, kv_heads, 2, head_dim]: the key of a head is followed by its value.

    Where the values are a prefix of the keys, only keys are stored:
    [pages, page_size, kv_heads, 1, head_dim].

    With a `storage`, kv holds codes, and kv_scales [pages, page_size, kv_heads, 2] has the scales
    of key and value in bfloat16. `uint4` also has zero points kv_zeros of the same shape in int16.
    A byte of `uint4` has the key's code in its low and the value's code in its high four bits, so
    kv is [pages, page_size, kv_heads, 1, head_dim]: a kernel reads both at once. Where only keys
    are stored, codes i and i + ceil(head_dim / 2) share byte i of [..., 1, ceil(head_dim / 2)].
    """

    offset_axis: ClassVar[int] = 1
    serves_v_prefix: ClassVar[bool] = True
    storages: ClassVar[frozenset[str]] = KV_STORAGES

    @property
    def name(self) -> str:
        return "nhd"

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.storage] if self.storage else 0.0

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        heads = (self.num_pages, self.page_size, self.num_kv_heads)
        parts = 1 if self.v_prefix_dim else 2
        if self.storage is None:
            values = (*heads, parts, self.head_dim)
            return {"kv": jax.ShapeDtypeStruct(values, jnp.dtype(self.dtype))}
        values = (*heads, parts, self.head_dim)
        if self.storage == "uint4":
            width = -(-self.head_dim // 2) if self.v_prefix_dim else self.head_dim
            values = (*heads, 1, width)
        found = {
            "kv": jax.ShapeDtypeStruct(values, VALUE_DTYPES[self.storage]),
            "kv_scales": jax.ShapeDtypeStruct((*heads, parts), SCALE_DTYPE),
        }
        if self.storage == "uint4":
            found["kv_zeros"] = jax.ShapeDtypeStruct((*heads, parts), ZERO_DTYPE)
        return found

    def head_axis(self) -> dict[str, int]:
        return dict.fromkeys(self.shapes(), 2)

    def stored(self, k: jax.Array, v: jax.Array) -> dict[str, jax.Array]:
        """Return k and v [tokens, kv_heads, width] as the arrays store them: [tokens, kv_heads,
        ...] by array.
        """
        rows = jnp.stack([k] if self.v_prefix_dim else [k, v], axis=2)
        if self.storage is None:
            return {"kv": rows.astype(self.dtype)}
        heads = QUANTIZE[self.storage](rows)
        codes = heads.codes
        if self.storage == "uint4" and self.v_prefix_dim:
            codes = pack_halves(codes)
        elif self.storage == "uint4":
            codes = pack_nibbles(codes[..., :1, :], codes[..., 1:, :])
        found = {"kv": codes, "kv_scales": heads.scales}
        return found if heads.zeros is None else {**found, "kv_zeros": heads.zeros}

    def write(
        self, cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array
    ) -> dict[str, jax.Array]:
        where = self.split_slots(slots)
        return {n: cache[n].at[where].set(new, mode="drop") for n, new in self.stored(k, v).items()}

    def read(self, cache: CacheArrays, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._pair({n: array[pages] for n, array in cache.items()})

    def read_tokens(self, cache: CacheArrays, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._pair(self._at(cache, slots))

    def read_exact(self, cache: CacheArrays, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._pair(self._at(cache, slots), "float32")

    def _at(self, cache: CacheArrays, slots: jax.Array) -> dict[str, jax.Array]:
        where = self.split_slots(slots)
        return {n: array[where] for n, array in cache.items()}

    def _pair(self, found: CacheArrays, dtype: str | None = None) -> tuple[jax.Array, jax.Array]:
        """Return keys and values of parts of the arrays in `dtype`, or in that of the layout."""
        dtype, rows = dtype or self.dtype, found["kv"]
        if self.storage == "uint4" and self.v_prefix_dim:
            rows = unpack_halves(rows, self.head_dim)
        elif self.storage == "uint4":
            rows = jnp.concatenate(unpack_nibbles(rows), axis=-2)
        if self.storage:
            heads = QuantizedHeads(rows, found["kv_scales"], found.get("kv_zeros"))
            rows = narrowed(heads.values(), dtype)
        k = rows[..., 0, :].astype(dtype)
        if self.v_prefix_dim:
            return k, k[..., : self.v_prefix_dim]
        return k, rows[..., 1, :].astype(dtype)
