"""Checks of kv_write and rope_kv_write, in every layout that a kernel supports and every storage
that it declares.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay_testing.case_runs import kit_jit, other_inputs, taken
from enginebay_testing.layouts import poisoned_cache
from enginebay_testing.op_kit import PlainCase
from enginebay_testing.verdicts import expect
from enginebay_xla.kit.heads import new_heads
from enginebay_xla.kit.plain import hold_turned, rope_positions, rope_spec

MANY_PAGES = 300
"""Ids of pages that 8 bits do not hold."""

DONATED_RUNS = 3
"""How often a program that takes the cache's memory runs."""


def _layout(case: PlainCase) -> KVLayout:
    """Return a layout with pages for all tokens and two more, or many more."""
    page, width = case.int("page"), case.int("head_dim")
    more = MANY_PAGES if case.row["pages"] == "many" else 2
    sizes = (-(-case.int("tokens") // page) + more, page, case.int("kv_heads"), width)
    kind, prefix = case.layouts[str(case.row["layout"])], width * 3 // 4
    storage = case.row["storage"]
    return kind(
        *sizes,
        str(case.row["dtype"]),
        prefix if case.row["latent"] else None,
        None if storage is None else str(storage),
    )


def _slots(case: PlainCase, layout: KVLayout) -> np.ndarray:
    """Return slots int32 [tokens]; all are different except the dropped ones. With many pages, half
    of the scattered ones are in the last pages.
    """
    rng, tokens = case.rng(), case.int("tokens")
    places = layout.num_pages * layout.page_size
    scattered = rng.permutation(places)[:tokens]
    kind, many = case.row["slots"], case.row["pages"] == "many"
    if many:
        late = MANY_PAGES // 10 * layout.page_size
        some = rng.permutation(late)[: min(late, (tokens + 1) // 2)] + places - late
        others = rng.permutation(places - late)[: tokens - some.size]
        scattered = np.concatenate([some, others])
    if kind == "dropped":
        scattered[:] = -1
    elif kind == "run":
        first = (MANY_PAGES // 2 if many else 1) * layout.page_size
        scattered = np.arange(tokens) + first - 1 + case.seed % 2
    elif kind == "last":
        scattered = places - 1 - np.arange(tokens)
    elif kind == "some_dropped":
        scattered[1::2] = -1
    return scattered.astype(np.int32)


def _ran(
    case: PlainCase, call: Callable[..., Any], arguments: tuple[Any, ...], cache_at: int
) -> Any:
    """Return the results of a call; where the case says so, the call takes the cache's memory."""
    others = other_inputs(arguments, with_integers=True)
    if not case.row["donated"]:
        return case.run(call, *arguments, others=others)
    step = case.runs.once("donated", lambda: jax.jit(call, donate_argnums=(cache_at,)))
    found = [taken(step(*jax.device_put(others)), others)]
    for _ in range(DONATED_RUNS):
        found.append(taken(step(*jax.device_put(arguments)), arguments))
        both = zip(*(jax.tree.leaves(each) for each in (found[-1], found[1])), strict=True)
        expect(
            all(a.tobytes() == b.tobytes() for a, b in both),
            "another run of a step that takes the cache's memory returned other bits",
        )
    return found[-1]


def _written(
    layout: KVLayout, cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array
) -> dict[str, jax.Array]:
    return layout.write(cache, slots, k, v)


def _contents(layout: KVLayout, caches: tuple[CacheArrays, ...]) -> Any:
    """Return all that caches hold, by slot and without loss."""
    slots = jnp.arange(layout.num_pages * layout.page_size)
    return [layout.read_exact(cache, slots) for cache in caches]


def _compared(layout: KVLayout, got: Any, before: Any, *new: Any) -> Any:
    """Return the contents of a cache, and of `before` after the layout's own write."""
    return _contents(layout, (got, layout.write(before, *new)))


_write = kit_jit(_written, static_argnums=(0,))
_read = kit_jit(_contents, static_argnums=(0,))
_compare = kit_jit(_compared, static_argnums=(0,))


def _same_arrays(layout: KVLayout, got: CacheArrays) -> None:
    """Check the names, shapes and dtypes of the cache's arrays."""
    shapes = {name: (s.shape, jnp.dtype(s.dtype)) for name, s in layout.shapes().items()}
    found = {n: (a.shape, a.dtype) for n, a in got.items()}
    expect(found == shapes, f"the cache has the arrays {found}, expected {shapes}")


def _different(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return which entries differ in bits."""
    bits = f"u{one.dtype.itemsize}"
    return np.asarray(one.view(bits) != np.asarray(other).view(bits))


def check_kv_write_case(kernel: Any, case: PlainCase) -> None:
    """Check that new tokens are where the layout's own write puts them, nothing else changed. In a
    quantised cache every byte of codes and scales is the layout's.
    """
    layout = _layout(case)
    slots = _slots(case, layout)
    shape = (slots.size, layout.num_kv_heads, layout.head_dim)
    k, v = (new_heads(case, shape, part) for part in (0, 1))
    v = k[..., : layout.v_prefix_dim] if layout.v_prefix_dim else v
    poison = poisoned_cache(layout)
    got = dict(_ran(case, functools.partial(kernel, layout=layout), (poison, slots, k, v), 0))
    _same_arrays(layout, got)
    wanted = {n: np.asarray(a) for n, a in _write(layout, poison, slots, k, v).items()}
    if layout.storage:
        _hold_bytes(got, wanted, poison)
    if all(got[n].tobytes() == wanted[n].tobytes() for n in wanted):
        return
    now, expected = jax.tree.map(np.asarray, _read(layout, (got, wanted)))
    for name, found, right in zip("kv", now, expected, strict=True):
        different = _different(found, right)
        expect(
            not different.any(),
            f"{name}: {int(different.any(axis=-1).sum())} heads of places differ from the "
            "layout's own write",
        )


def _hold_bytes(
    got: Mapping[str, Any], wanted: Mapping[str, Any], before: Mapping[str, Any]
) -> None:
    for name, right in wanted.items():
        wrong = _different(np.asarray(got[name]), np.asarray(right))
        if not wrong.any():
            continue
        kept = not _different(np.asarray(got[name]), np.asarray(before[name]))[wrong].any()
        cause = "; it still has what it had before" if kept else ""
        first = tuple(int(i) for i in np.argwhere(wrong)[0])
        expect(
            not wrong.any(),
            f"{name}: {int(wrong.sum())} entries differ from the layout's own write, first at "
            f"{first}: {got[name][first]}, expected {right[first]}{cause}",
        )


def check_rope_kv_write_case(kernel: Any, case: PlainCase) -> None:
    """Check that q and the written k are rotated, v is unchanged, and nothing else changed."""
    layout, spec = _layout(case), rope_spec(case)
    slots = _slots(case, layout)
    positions = rope_positions(case, slots.size)
    rng, shape = case.rng(), (slots.size, layout.num_kv_heads, layout.head_dim)
    q = rng.normal(size=(shape[0], case.int("group") * shape[1], shape[2])).astype(case.dtype)
    k, v = rng.normal(size=shape).astype(case.dtype), new_heads(case, shape, 1)
    poison = poisoned_cache(layout)
    call = functools.partial(kernel, spec=spec, layout=layout)
    turned, after = _ran(case, call, (q, k, v, poison, positions, slots), 3)
    _same_arrays(layout, after)
    hold_turned(turned, q, positions, spec, "q")
    places = slots[slots >= 0]
    for name, before in poison.items():
        others = np.delete(_by_place(layout, name, _different(after[name], before)), places, axis=0)
        expect(
            not others.any(), f"{name}: {int(others.sum())} entries of other places have changed"
        )
    found = _compare(layout, after, poison, slots, k, v)
    (keys, values), (_, right) = jax.tree.map(np.asarray, found)
    keys = keys[places].astype(case.dtype)
    hold_turned(keys, k[slots >= 0], positions[slots >= 0], spec, "k", layout)
    expect(not _different(values, right)[places].any(), "v is not at its slots")


def _by_place(layout: KVLayout, name: str, array: np.ndarray) -> np.ndarray:
    """Return an array of the cache as [places, ...]."""
    moved = np.moveaxis(array, layout.offset_axis_of(name), 1)
    return moved.reshape(layout.num_pages * layout.page_size, -1)
