"""Faulty cache layouts: they lose, move or change what was written, or say wrongly how their arrays
lie.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay_testing.layouts import check_layout
from enginebay_triton.layout import NhdLayout
from enginebay_xla.layout import HndLayout

Check = tuple[str, Callable[[], None]]
Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Swapped(HndLayout):
    """Reads keys as values and values as keys."""

    def read(self, cache: CacheArrays, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        return super().read(cache, pages)[::-1]


@dataclasses.dataclass(frozen=True)
class Shifted(HndLayout):
    """Writes each token a place too far."""

    def write(self, cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array) -> Arrays:
        return super().write(cache, jnp.where(slots < 0, slots, slots + 1), k, v)


@dataclasses.dataclass(frozen=True)
class Wrapping(HndLayout):
    """Writes padding to the end of the cache."""

    def write(self, cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array) -> Arrays:
        return super().write(cache, slots % (self.num_pages * self.page_size), k, v)


@dataclasses.dataclass(frozen=True)
class Clearing(HndLayout):
    """Clears the rest of a page that it writes to."""

    def write(self, cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array) -> Arrays:
        pages, _ = self.split_slots(slots)
        empty = {name: array.at[pages].set(0, mode="drop") for name, array in cache.items()}
        return super().write(empty, slots, k, v)


@dataclasses.dataclass(frozen=True)
class Rounding(HndLayout):
    """Keeps eight bits of each value, and does not say so."""

    def write(self, cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array) -> Arrays:
        k, v = (x.astype(jnp.float8_e4m3fn).astype(x.dtype) for x in (k, v))
        return super().write(cache, slots, k, v)


@dataclasses.dataclass(frozen=True)
class Reversed(NhdLayout):
    """Reads heads in another order than it writes them."""

    def read(self, cache: CacheArrays, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v = super().read(cache, pages)
        return k[..., ::-1, :], v[..., ::-1, :]


@dataclasses.dataclass(frozen=True)
class Neighbour(HndLayout):
    """Reads single tokens from the page after theirs."""

    def read_tokens(self, cache: CacheArrays, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        return super().read_tokens(
            cache, (slots + self.page_size) % (self.num_pages * self.page_size)
        )


@dataclasses.dataclass(frozen=True)
class Misplaced(HndLayout):
    """Says that tokens lie along another axis than they do."""

    offset_axis: ClassVar[int] = 1


@dataclasses.dataclass(frozen=True)
class Unsplit(HndLayout):
    """Says that heads lie along another axis than they do."""

    def head_axis(self) -> dict[str, int]:
        return {"k": 2, "v": 2}


@dataclasses.dataclass(frozen=True)
class Short(HndLayout):
    """Counts half of its bytes."""

    def num_bytes(self) -> int:
        return super().num_bytes() // 2


@dataclasses.dataclass(frozen=True)
class Narrow(HndLayout):
    """Reads pages in float32 whatever its dtype."""

    def read(self, cache: CacheArrays, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v = super().read(cache, pages)
        return k.astype(jnp.float16), v.astype(jnp.float16)


@dataclasses.dataclass(frozen=True)
class Quantised(HndLayout):
    """A right layout: eight bits a value, with a scale for each head of each token."""

    tolerance: ClassVar[float] = 1 / 127

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        rows = (self.num_pages, self.num_kv_heads, self.page_size)
        values = {
            n: jax.ShapeDtypeStruct((*rows, self.head_dim), jnp.dtype("int8")) for n in ("k", "v")
        }
        scales = {
            f"{n}_scale": jax.ShapeDtypeStruct(rows, jnp.dtype("float32")) for n in ("k", "v")
        }
        return values | scales

    def head_axis(self) -> dict[str, int]:
        return {"k": 1, "v": 1, "k_scale": 1, "v_scale": 1}

    def scales(self, x: jax.Array) -> jax.Array:
        """f32 [tokens, heads]: the largest value of each head of each token over 127, in eight
        bits, so that the product with a value of eight bits is exact.
        """
        scale = jnp.maximum(jnp.abs(x.astype(jnp.float32)).max(axis=-1), 1e-20) / 127
        return jax.lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=7)

    def write(self, cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array) -> Arrays:
        pages, offsets = self.split_slots(slots)
        after = dict(cache)
        for name, x in (("k", k), ("v", v)):
            scale = self.scales(x)
            codes = jnp.round(x.astype(jnp.float32) / scale[..., None]).astype(jnp.int8)
            after[name] = cache[name].at[pages, :, offsets].set(codes, mode="drop")
            after[f"{name}_scale"] = (
                cache[f"{name}_scale"].at[pages, :, offsets].set(scale, mode="drop")
            )
        return after

    def read(self, cache: CacheArrays, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v = (cache[n][pages] * cache[f"{n}_scale"][pages][..., None] for n in ("k", "v"))
        return (
            jnp.swapaxes(k, -3, -2).astype(self.dtype),
            jnp.swapaxes(v, -3, -2).astype(self.dtype),
        )

    def read_tokens(self, cache: CacheArrays, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v = self.read_exact(cache, slots)
        return k.astype(self.dtype), v.astype(self.dtype)

    def read_exact(self, cache: CacheArrays, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        pages, offsets = self.split_slots(slots)
        k, v = (
            cache[n][pages, :, offsets] * cache[f"{n}_scale"][pages, :, offsets][..., None]
            for n in ("k", "v")
        )
        return k, v


@dataclasses.dataclass(frozen=True)
class TooCoarse(Quantised):
    """Six bits a value, and the tolerance of eight."""

    def scales(self, x: jax.Array) -> jax.Array:
        return super().scales(x) * 4


@dataclasses.dataclass(frozen=True)
class SharedScale(Quantised):
    """One scale for all heads of a step's tokens: the last write decides for the page."""

    def write(self, cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array) -> Arrays:
        after = super().write(cache, slots, k, v)
        pages, _ = self.split_slots(slots)
        for name in ("k_scale", "v_scale"):
            after[name] = after[name].at[pages].set(after[name].max(), mode="drop")
        return after


@dataclasses.dataclass(frozen=True)
class Unscaled(HndLayout):
    """Reads codes of one token with the scale of its neighbour."""

    storage: str | None = "int8"

    def read_tokens(self, cache: CacheArrays, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        turned = {n: jnp.roll(x, 1, axis=2) if "scales" in n else x for n, x in cache.items()}
        return super().read_tokens(turned, slots)


@dataclasses.dataclass(frozen=True)
class Unzeroed(NhdLayout):
    """Reads pages of four bits without their zero points."""

    storage: str | None = "uint4"

    def read(self, cache: CacheArrays, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        return super().read({**cache, "kv_zeros": jnp.zeros_like(cache["kv_zeros"])}, pages)


@dataclasses.dataclass(frozen=True)
class Crossed(HndLayout):
    """Reads the two codes of a byte in the wrong order."""

    storage: str | None = "uint4"

    def read(self, cache: CacheArrays, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        turned = {n: (x << 4) | (x >> 4) if n in "kv" else x for n, x in cache.items()}
        return super().read(turned, pages)


@dataclasses.dataclass(frozen=True)
class Drifting(HndLayout):
    """Rounds to int8 within the tolerance, but by a scale that a second write does not find."""

    storage: str | None = "int8"

    def stored(self, k: jax.Array, v: jax.Array) -> Arrays:
        new = super().stored(k, v)
        scale = (new["k_scales"].astype(jnp.float32) * (1 + 2**-7)).astype(jnp.bfloat16)
        codes = jnp.rint(k.astype(jnp.float32) / scale.astype(jnp.float32)[..., None])
        return {**new, "k": codes.astype(jnp.int8), "k_scales": scale}


FAULTS: dict[str, type[KVLayout]] = {
    kind.__name__: kind
    for kind in (
        *(Swapped, Shifted, Wrapping, Clearing, Rounding, Reversed, Neighbour, Misplaced),
        *(Unsplit, Short, Narrow, TooCoarse, SharedScale),
        *(Unscaled, Unzeroed, Crossed, Drifting),
    )
}

RIGHT: dict[str, type[KVLayout]] = {"hnd": HndLayout, "quantised": Quantised}


def checks(part: type[KVLayout]) -> list[Check]:
    """The kit's suite in one dtype and shape."""
    return [("layout", lambda: check_layout(part(3, 4, 2, 8, "float32")))]
