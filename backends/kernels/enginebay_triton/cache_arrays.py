"""The arrays of a cache as Triton kernels read and write them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays, KVLayout

BITS = {"float8_e4m3fn": jnp.uint8, "bfloat16": jnp.uint16}
"""Dtypes of quantised caches that kernels read as bits."""


@dataclasses.dataclass(frozen=True)
class StoredCache:
    """A cache as the attention kernel reads it: each pair of arrays is for keys and for values.

    scales and zeros are None where the cache has none. `constants` are strides in elements, and how
    numbers are stored.
    """

    values: tuple[jax.Array, jax.Array]
    scales: tuple[jax.Array | None, jax.Array | None]
    zeros: tuple[jax.Array | None, jax.Array | None]
    constants: dict[str, Any]


def as_bits(array: jax.Array) -> jax.Array:
    """Return the same bytes in the dtype that kernels read; XLA copies nothing."""
    bits = BITS.get(str(array.dtype))
    return array if bits is None else jax.lax.bitcast_convert_type(array, bits)


def from_stored_bits(array: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Undo as_bits."""
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)


class StoringLayout(Protocol):
    """What the layouts nhd and hnd have in common."""

    def stored(self, k: jax.Array, v: jax.Array) -> dict[str, jax.Array]: ...


def stored_tokens(k: jax.Array, v: jax.Array, layout: KVLayout) -> CacheArrays:
    """Return k and v [T, kv_heads, head_dim] as the arrays of a quantised cache store them:
    [T, kv_heads, ...] by array.
    """
    return cast("StoringLayout", layout).stored(k, v)


def strides_of_heads(layout: KVLayout, width: int) -> tuple[int, int, int]:
    """Return the strides of a page, a token and a head, in elements, where a head has `width`."""
    heads, page = layout.num_kv_heads, layout.page_size
    if layout.name == "nhd":
        return page * heads * width, heads * width, width
    return heads * page * width, width, page * width


def stored_cache(cache: CacheArrays, layout: KVLayout) -> StoredCache:
    """Return a cache in layout nhd or hnd."""
    is_nhd, parts = layout.name == "nhd", 1 if layout.v_prefix_dim else 2
    names = ("kv", "kv") if is_nhd else ("k", "k" if layout.v_prefix_dim else "v")
    arrays = dict(cache) if layout.storage is None else {n: as_bits(a) for n, a in cache.items()}
    first = arrays[names[0]]
    width = first.shape[-1]
    head = math.prod(first.shape[3:]) if is_nhd else width
    scales = parts if is_nhd else 1
    strides = (*strides_of_heads(layout, head), head - width)
    of_scales = (*strides_of_heads(layout, scales), scales - 1)
    storage = layout.storage or "plain"
    if storage == "uint4":
        storage = "nibbles" if is_nhd and not layout.v_prefix_dim else "halves"
    constants = {
        "PAGE_SIZE": layout.page_size,
        "STORAGE": storage,
        "HALF": width,
        "HAS_ZEROS": layout.storage == "uint4",
        **dict(
            zip(("PAGE_STRIDE", "TOKEN_STRIDE", "HEAD_STRIDE", "V_OFFSET"), strides, strict=True)
        ),
        **dict(
            zip(("SCALES_PAGE", "SCALES_TOKEN", "SCALES_HEAD", "V_SCALE"), of_scales, strict=True)
        ),
    }

    def pair(suffix: str) -> tuple[jax.Array | None, jax.Array | None]:
        k, v = (arrays.get(name + suffix) for name in names)
        return k, v

    return StoredCache((first, arrays[names[1]]), pair("_scales"), pair("_zeros"), constants)
