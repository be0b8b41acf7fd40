"""The op kv_write in plain JAX: many ways to bring tokens to their slots."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.errors import UnsupportedError
from enginebay.ops.kv_storage import BYTES, FP8, MAX_FP8, MAX_INT8, MAX_VALUE, MIN_SCALE

LAYOUTS = ("hnd", "nhd", "tpu_rpa")
STORAGES = ("int8", "uint4", "fp8")

WriteWay = Callable[[CacheArrays, jax.Array, jax.Array, jax.Array, KVLayout], CacheArrays]
"""(cache, slots, k, v, layout) -> cache, as the op; there is a token at least."""


def by_layout(
    cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array, layout: KVLayout
) -> CacheArrays:
    """The last token first."""
    return layout.write(cache, slots[::-1], k[::-1], v[::-1])


def each_token(
    cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array, layout: KVLayout
) -> CacheArrays:
    """One token after the other."""

    def put(i: jax.Array, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        slot, key, value = (jax.lax.dynamic_slice_in_dim(x, i, 1) for x in (slots, k, v))
        return layout.write(arrays, slot, key, value)

    return jax.lax.fori_loop(0, slots.shape[0], put, dict(cache))


def in_order(
    cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array, layout: KVLayout
) -> CacheArrays:
    """In the order of slots, the dropped tokens last."""
    order = jnp.argsort(jnp.where(slots < 0, jnp.iinfo(jnp.int32).max, slots))
    return layout.write(cache, slots[order], k[order], v[order])


def every_other(
    cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array, layout: KVLayout
) -> CacheArrays:
    """Every other token, then those between them."""
    for first in (0, 1):
        if slots[first::2].size:
            cache = layout.write(cache, slots[first::2], k[first::2], v[first::2])
    return cache


def in_chunks(
    cache: CacheArrays,
    slots: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layout: KVLayout,
    *,
    size: int,
) -> CacheArrays:
    """So many tokens at a time; the last chunk ends with dropped tokens."""
    count = -(-slots.shape[0] // size)
    missing = count * size - slots.shape[0]
    slots = jnp.pad(slots, (0, missing), constant_values=-1)
    k, v = (jnp.pad(x, ((0, missing), (0, 0), (0, 0))) for x in (k, v))
    chunks = [x.reshape(count, size, *x.shape[1:]) for x in (slots, k, v)]

    def put(
        arrays: dict[str, jax.Array], chunk: list[jax.Array]
    ) -> tuple[dict[str, jax.Array], None]:
        return layout.write(arrays, chunk[0], chunk[1], chunk[2]), None

    return jax.lax.scan(put, dict(cache), chunks)[0]


def staged(layout: KVLayout, k: jax.Array, v: jax.Array) -> dict[str, jax.Array]:
    """Tokens as the layout stores them, [T, ...] by array: written into a cache of pages of one
    token.
    """
    stage = layout.resized(num_pages=k.shape[0], page_size=1)
    written = stage.write(stage.init(), jnp.arange(k.shape[0]), k, v)
    return {n: jnp.squeeze(x, stage.offset_axis_of(n)) for n, x in written.items()}


def by_masks(
    cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array, layout: KVLayout
) -> CacheArrays:
    """Every place of the cache asks which token it gets, if any."""
    places = jnp.arange(layout.num_pages * layout.page_size)
    hits = slots[:, None] == places
    token, is_hit = hits.argmax(axis=0), hits.any(axis=0)
    done = {}
    for name, new in staged(layout, k, v).items():
        axis = layout.offset_axis_of(name)
        old = jnp.moveaxis(cache[name], axis, 1)
        shape = (layout.num_pages, layout.page_size)
        chosen = new[token.reshape(shape)]
        mask = is_hit.reshape(*shape, *(1,) * (old.ndim - 2))
        done[name] = jnp.moveaxis(jnp.where(mask, chosen, old), 1, axis)
    return done


def by_flat_places(
    cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array, layout: KVLayout
) -> CacheArrays:
    """Into arrays whose first axis counts slots."""
    total = layout.num_pages * layout.page_size
    places = jnp.where(slots < 0, total, slots)
    done = {}
    for name, new in staged(layout, k, v).items():
        axis = layout.offset_axis_of(name)
        paged = jnp.moveaxis(cache[name], axis, 1)
        flat = paged.reshape(total, *paged.shape[2:])
        flat = flat.at[places].set(new, mode="drop", unique_indices=False)
        done[name] = jnp.moveaxis(flat.reshape(paged.shape), 1, axis)
    return done


def by_pages(
    cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array, layout: KVLayout
) -> CacheArrays:
    """The page of each token is read, gets all tokens that belong there, and is written back."""
    new = staged(layout, k, v)
    pages = jnp.where(slots < 0, -1, slots // layout.page_size)
    offsets = slots % layout.page_size

    def put(i: jax.Array, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        page = jnp.maximum(pages[i], 0)
        mine = (pages == pages[i]) & (pages >= 0)
        hits = mine[:, None] & (offsets[:, None] == jnp.arange(layout.page_size))
        token, is_hit = hits.argmax(axis=0), hits.any(axis=0)
        done = {}
        for name, array in arrays.items():
            axis = layout.offset_axis_of(name) - 1
            old = jnp.moveaxis(jax.lax.dynamic_index_in_dim(array, page, keepdims=False), axis, 0)
            mask = is_hit.reshape(-1, *(1,) * (old.ndim - 1))
            filled = jnp.moveaxis(jnp.where(mask, new[name][token], old), 0, axis)
            done[name] = jax.lax.dynamic_update_index_in_dim(array, filled, page, 0)
        return done

    return jax.lax.fori_loop(0, slots.shape[0], put, dict(cache))


def by_pieces(
    cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array, layout: KVLayout
) -> CacheArrays:
    """A slice of one token after the other; a dropped token writes what is there already."""
    new = staged(layout, k, v)

    def put(i: jax.Array, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        slot = jnp.maximum(slots[i], 0)
        done = {}
        for name, array in arrays.items():
            axis = layout.offset_axis_of(name)
            start = [jnp.int32(0)] * array.ndim
            start[0], start[axis] = slot // layout.page_size, slot % layout.page_size
            sizes = list(array.shape)
            sizes[0] = sizes[axis] = 1
            piece = jnp.expand_dims(new[name][i][None], axis)
            old = jax.lax.dynamic_slice(array, start, sizes)
            piece = jnp.where(slots[i] < 0, old, piece)
            done[name] = jax.lax.dynamic_update_slice(array, piece, start)
        return done

    return jax.lax.fori_loop(0, slots.shape[0], put, dict(cache))


def head_by_head(
    cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array, layout: KVLayout
) -> CacheArrays:
    """One KV head after the other, in the layout hnd, whose arrays have heads on axis 1."""
    pages, offsets = layout.split_slots(slots)
    arrays = dict(cache)
    for name, new in staged(layout, k, v).items():
        for head in range(layout.num_kv_heads):
            where = (pages, jnp.full_like(pages, head), offsets)
            arrays[name] = arrays[name].at[where].set(new[:, head], mode="drop")
    return arrays


def with_reciprocals(
    cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array, layout: KVLayout
) -> CacheArrays:
    """In the layout hnd, with codes of int8 and fp8 by products with the reciprocal of the scale,
    which is off by less than the 2**-17 that a storage allows.
    """
    arrays = dict(cache)
    pages, offsets = layout.split_slots(slots)
    for name, heads in zip("k" if layout.v_prefix_dim else "kv", (k, v), strict=False):
        new = {name: heads.astype(layout.dtype)}
        if layout.storage:
            largest = MAX_INT8 if layout.storage == "int8" else MAX_FP8
            codes, scales = _codes(heads.astype(jnp.float32), largest)
            if layout.storage == "fp8":
                codes = jax.lax.bitcast_convert_type(codes.astype(FP8), BYTES)
            else:
                codes = jnp.rint(codes).astype(jnp.int8)
            new = {name: codes, f"{name}_scales": scales}
        for each, rows in new.items():
            arrays[each] = arrays[each].at[pages, :, offsets].set(rows, mode="drop")
    return arrays


def _codes(heads: jax.Array, largest: int) -> tuple[jax.Array, jax.Array]:
    """Codes f32, before rounding, and scales bfloat16."""
    highest = jnp.abs(heads).max(axis=-1)
    scales = jax.lax.reduce_precision(highest * (1 / largest), exponent_bits=8, mantissa_bits=7)
    scales = jnp.where(scales < MIN_SCALE, 0.0, scales)
    good = (scales * largest < MAX_VALUE) & jnp.isfinite(heads).all(axis=-1)
    reciprocal = 1 / jnp.where(scales > 0, scales, 1.0)
    codes = jnp.clip(heads * reciprocal[..., None], -largest, largest)
    codes = jnp.where((good & (scales > 0))[..., None], codes, 0)
    return codes, jnp.where(good, scales, jnp.nan).astype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Write:
    """See the module."""

    way: WriteWay
    layouts: tuple[str, ...] = LAYOUTS
    storages: tuple[str, ...] = ()

    @property
    def capabilities(self) -> dict[str, tuple[str, ...]]:
        """What a declaration of the kernel would say."""
        return {"layouts": self.layouts, "storages": self.storages}

    def __call__(
        self,
        cache: CacheArrays,
        slots: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        layout: KVLayout,
    ) -> CacheArrays:
        if layout.name not in self.layouts:
            given, allowed = f"a cache in the layout {layout.name}", ", ".join(self.layouts)
            raise UnsupportedError(given, allowed, "Choose another kernel.")
        if layout.storage not in (None, *self.storages):
            given, allowed = f"a cache in {layout.storage}", ", ".join(self.storages) or "floats"
            raise UnsupportedError(given, allowed, "Choose another kernel.")
        return self.way(cache, slots, k, v, layout) if slots.shape[0] else cache


last_first = Write(by_layout, storages=STORAGES)
tokens = Write(each_token, storages=STORAGES)
ordered = Write(in_order, storages=("int8",))
alternating = Write(every_other, storages=STORAGES)
chunks_of_five = Write(functools.partial(in_chunks, size=5), storages=STORAGES)
masks = Write(by_masks, storages=("uint4", "fp8"))
flat = Write(by_flat_places, storages=STORAGES)
pages = Write(by_pages, storages=STORAGES)
pieces = Write(by_pieces, layouts=("nhd", "tpu_rpa"), storages=("int8", "uint4"))
heads = Write(head_by_head, layouts=("hnd",), storages=STORAGES)
reciprocals = Write(with_reciprocals, layouts=("hnd",), storages=("int8", "fp8"))
