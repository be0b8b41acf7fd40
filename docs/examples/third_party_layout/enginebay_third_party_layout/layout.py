"""A cache of int8 keys and values with a scale for each head of each token."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay_third_party_layout.plugin import LAYOUT

LARGEST = 127
SCALE = jnp.dtype(jnp.bfloat16)
"""The dtype of scales. The product of 127 and a number of eight significant bits is exact in f32,
so writing values that were read gives the same bits again.
"""


def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For x [..., head_dim] return (int8 values [..., head_dim], scales [...])."""
    wide = x.astype(jnp.float32)
    scales = (jnp.abs(wide).max(axis=-1) / LARGEST).astype(SCALE)
    divisor = scales.astype(jnp.float32)
    values = jnp.rint(wide / jnp.where(divisor > 0, divisor, 1)[..., None])
    return jnp.nan_to_num(values).clip(-LARGEST, LARGEST).astype(jnp.int8), scales


@dataclasses.dataclass(frozen=True)
class Int8HeadsLayout(KVLayout):
    """k, v int8 [pages, page_size, kv_heads, head_dim]; k_scales, v_scales [pages, page_size,
    kv_heads]. `dtype` is the dtype of values that are written and read.
    """

    offset_axis: ClassVar[int] = 1
    tolerance: ClassVar[float] = 0.004
    """Rounding to int8 is off by at most 1/254 of the largest value; the scale is rounded too."""

    @property
    def name(self) -> str:
        return LAYOUT

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        places = (self.num_pages, self.page_size, self.num_kv_heads)
        values = jax.ShapeDtypeStruct((*places, self.head_dim), jnp.dtype(jnp.int8))
        scales = jax.ShapeDtypeStruct(places, SCALE)
        return {"k": values, "v": values, "k_scales": scales, "v_scales": scales}

    def head_axis(self) -> dict[str, int]:
        return dict.fromkeys(self.shapes(), 2)

    def write(
        self, cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array
    ) -> dict[str, jax.Array]:
        where = self.split_slots(slots)
        new: dict[str, jax.Array] = {}
        for name, rows in (("k", k), ("v", v)):
            new[name], new[f"{name}_scales"] = quantize(rows)
        return {name: cache[name].at[where].set(rows, mode="drop") for name, rows in new.items()}

    def read(self, cache: CacheArrays, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._rounded(_dequantized(cache, pages))

    def read_tokens(self, cache: CacheArrays, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._rounded(self.read_exact(cache, slots))

    def read_exact(self, cache: CacheArrays, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _dequantized(cache, self.split_slots(slots))

    def _rounded(self, both: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        k, v = both
        return k.astype(self.dtype), v.astype(self.dtype)


def _dequantized(
    cache: CacheArrays, where: jax.Array | tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    rows = {name: array[where].astype(jnp.float32) for name, array in cache.items()}
    k, v = (rows[name] * rows[f"{name}_scales"][..., None] for name in ("k", "v"))
    return k, v
