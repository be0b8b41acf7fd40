"""The cache layout that XLA on CPUs and cuDNN read fastest."""

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
    unpack_halves,
)


@dataclasses.dataclass(frozen=True)
class HndLayout(KVLayout):
    """k, v [pages, kv_heads, page_size, head_dim]: the keys of a head lie together.

    Where the values are a prefix of the keys there is no array v.

    With a `storage`, the arrays hold codes, and there are scales k_scales, v_scales [pages,
    kv_heads, page_size] in bfloat16. `uint4` also has zero points k_zeros, v_zeros of the same
    shape in int16, and packs codes i and i + ceil(head_dim / 2) into byte i of
    [..., ceil(head_dim / 2)].
    """

    offset_axis: ClassVar[int] = 2
    serves_v_prefix: ClassVar[bool] = True
    storages: ClassVar[frozenset[str]] = KV_STORAGES

    @property
    def name(self) -> str:
        return "hnd"

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.storage] if self.storage else 0.0

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        places = (self.num_pages, self.num_kv_heads, self.page_size)
        dtype = VALUE_DTYPES[self.storage] if self.storage else jnp.dtype(self.dtype)
        width = -(-self.head_dim // 2) if self.storage == "uint4" else self.head_dim
        found = {n: jax.ShapeDtypeStruct((*places, width), dtype) for n in self._names}
        if self.storage:
            scales = jax.ShapeDtypeStruct(places, SCALE_DTYPE)
            found |= {f"{n}_scales": scales for n in self._names}
        if self.storage == "uint4":
            zeros = jax.ShapeDtypeStruct(places, ZERO_DTYPE)
            found |= {f"{n}_zeros": zeros for n in self._names}
        return found

    @property
    def _names(self) -> str:
        return "k" if self.v_prefix_dim else "kv"

    def head_axis(self) -> dict[str, int]:
        return dict.fromkeys(self.shapes(), 1)

    def stored(self, k: jax.Array, v: jax.Array) -> dict[str, jax.Array]:
        """Return k and v [tokens, kv_heads, width] as the arrays store them: [tokens, kv_heads,
        ...] by array.
        """
        found: dict[str, jax.Array] = {}
        for n, rows in zip(self._names, (k, v), strict=False):
            if self.storage is None:
                found[n] = rows.astype(self.dtype)
                continue
            heads = QUANTIZE[self.storage](rows)
            found[n] = pack_halves(heads.codes) if self.storage == "uint4" else heads.codes
            found[f"{n}_scales"] = heads.scales
            if heads.zeros is not None:
                found[f"{n}_zeros"] = heads.zeros
        return found

    def write(
        self, cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array
    ) -> dict[str, jax.Array]:
        pages, offsets = self.split_slots(slots)
        return {
            n: cache[n].at[pages, :, offsets].set(new, mode="drop")
            for n, new in self.stored(k, v).items()
        }

    def read(self, cache: CacheArrays, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = {n: array[pages] for n, array in cache.items()}
        k, v = self._pair(found)
        return jnp.swapaxes(k, -3, -2), jnp.swapaxes(v, -3, -2)

    def read_tokens(self, cache: CacheArrays, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._pair(self._at(cache, slots))

    def read_exact(self, cache: CacheArrays, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._pair(self._at(cache, slots), "float32")

    def _at(self, cache: CacheArrays, slots: jax.Array) -> dict[str, jax.Array]:
        pages, offsets = self.split_slots(slots)
        return {n: array[pages, :, offsets] for n, array in cache.items()}

    def heads(self, found: CacheArrays, name: str) -> QuantizedHeads:
        """Return the keys (name "k") or values ("v") of parts of the arrays, with unpacked
        codes.
        """
        codes = found[name]
        if self.storage == "uint4":
            codes = unpack_halves(codes, self.head_dim)
        return QuantizedHeads(codes, found[f"{name}_scales"], found.get(f"{name}_zeros"))

    def _pair(self, found: CacheArrays, dtype: str | None = None) -> tuple[jax.Array, jax.Array]:
        """Return keys and values of parts of the arrays in `dtype`, or in that of the layout; the
        values are columns of the keys where there is no array v.
        """
        dtype = dtype or self.dtype
        if self.storage:
            both = {n: narrowed(self.heads(found, n).values(), dtype) for n in self._names}
        else:
            both = {n: found[n].astype(dtype) for n in self._names}
        return both["k"], both["v"] if "v" in both else both["k"][..., : self.v_prefix_dim]
