"""Checks of kv_write and rope_kv_write, in every layout that a kernel supports."""

from __future__ import annotations

import unittest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.cache import CacheArrays, KVLayout
from enginebay_testing.layouts import poisoned_cache
from enginebay_testing.op_kit import PlainCase
from enginebay_testing.verdicts import expect
from enginebay_xla.kit.plain import hold_turned, rope_positions, rope_spec


def _layout(case: PlainCase) -> KVLayout:
    """Return a layout with pages for all tokens and two more.

    Raises SkipTest where the layout does not support a latent cache.
    """
    page, width = case.int("page"), case.int("head_dim")
    sizes = (-(-case.int("tokens") // page) + 2, page, case.int("kv_heads"), width)
    kind, prefix = case.layouts[str(case.row["layout"])], width * 3 // 4
    if case.row["latent"] and not kind.serves_v_prefix:
        raise unittest.SkipTest(
            f"{kind.__name__} does not support values that are a prefix of keys"
        )
    return kind(*sizes, str(case.row["dtype"]), prefix if case.row["latent"] else None)


def _slots(case: PlainCase, layout: KVLayout) -> np.ndarray:
    """Return slots int32 [tokens]; all are different except the dropped ones."""
    rng, tokens = case.rng(), case.int("tokens")
    places = layout.num_pages * layout.page_size
    scattered = rng.permutation(places)[:tokens]
    kind = case.row["slots"]
    if kind == "dropped":
        scattered[:] = -1
    elif kind == "run":
        scattered = np.arange(tokens) + layout.page_size - 1
    elif kind == "last":
        scattered = places - 1 - np.arange(tokens)
    elif kind == "some_dropped":
        scattered[::2] = -1
    return scattered.astype(np.int32)


def check_kv_write_case(kernel: Any, case: PlainCase) -> None:
    """Check that new tokens are where the layout's own write puts them, nothing else changed."""
    layout = _layout(case)
    slots = _slots(case, layout)
    k, v = (
        case.rng()
        .normal(size=(2, slots.size, layout.num_kv_heads, layout.head_dim))
        .astype(case.dtype)
    )
    v = v[..., : layout.v_prefix_dim]

    # One program writes by the kernel and by the layout, and reads both caches.
    def both(cache: CacheArrays) -> Any:
        got = dict(kernel(cache, slots, k, v, layout=layout))
        wanted = layout.write(cache, jnp.asarray(slots), k, v)
        return got, (_read(layout, got), _read(layout, wanted))

    got, (now, wanted) = case.run(both, poisoned_cache(layout))
    shapes = {name: (s.shape, jnp.dtype(s.dtype)) for name, s in layout.shapes().items()}
    expect(
        {n: (a.shape, a.dtype) for n, a in got.items()} == shapes,
        f"the arrays of the cache have other names: {list(got)}",
    )
    for name, found, expected in zip("kv", now, wanted, strict=True):
        different = found.view(np.uint8) != expected.view(np.uint8)
        expect(
            not different.any(),
            f"{name}: {int(different.any(axis=-1).sum())} heads of places differ from the "
            "layout's own write",
        )


def _read(layout: KVLayout, cache: CacheArrays) -> tuple[jax.Array, jax.Array]:
    return layout.read(cache, jnp.arange(layout.num_pages))


def check_rope_kv_write_case(kernel: Any, case: PlainCase) -> None:
    """Check that q and the written k are rotated, v is unchanged, and nothing else changed."""
    layout, spec = _layout(case), rope_spec(case)
    slots = _slots(case, layout)
    positions = rope_positions(case, slots.size)
    rng, shape = case.rng(), (slots.size, layout.num_kv_heads, layout.head_dim)
    q = rng.normal(size=(shape[0], case.int("group") * shape[1], shape[2])).astype(case.dtype)
    k, v = rng.normal(size=(2, *shape)).astype(case.dtype)

    def step(cache: CacheArrays, *arrays: Any) -> Any:
        q, k, v, positions, slots = arrays
        turned, after = kernel(q, k, v, cache, positions, slots, spec=spec, layout=layout)
        return turned, _read(layout, after), _read(layout, layout.write(cache, slots, k, v))

    turned, read, kept = case.run(step, poisoned_cache(layout), q, k, v, positions, slots)
    hold_turned(turned, q, positions, spec, "q")
    keys, values = (np.asarray(x).reshape(-1, *shape[1:]) for x in read)
    written = slots >= 0
    places = slots[written]
    hold_turned(keys[places], k[written], positions[written], spec, "k", layout.tolerance)
    wanted = np.asarray(kept[1]).reshape(values.shape)
    expect((values[places] == wanted[places]).all(), "v is not at its slots")
    others = np.delete(np.arange(keys.shape[0]), places)
    for name, array in (("k", keys), ("v", values)):
        expect(
            np.isnan(array[others].astype(np.float64)).all(), f"{name}: other places have changed"
        )
