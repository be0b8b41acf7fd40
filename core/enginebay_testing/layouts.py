"""Conformance suite for cache layouts; it uses only the public methods of KVLayout."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.plugins.registry import load_registry
from enginebay.weights import stored_bytes
from enginebay_runtime.compacting import compact_rows
from enginebay_testing.verdicts import Check

PAGES_ASKED_FOR = (2, 3)
"""Shape of an array of page ids."""


def layout_checks(kind: type[KVLayout], dtypes: Sequence[str]) -> list[Check]:
    """Return the checks of a layout, by name: in each dtype, with each of its storages, and with
    values that are a prefix of the keys if it supports them.
    """
    plain: list[tuple[tuple[int, ...], int | None]] = [((3, 4, 2, 8), None), ((2, 16, 3, 40), None)]
    # Four heads fill a word of bytes, so that more heads lengthen an array that packs them.
    quantised: list[tuple[tuple[int, ...], int | None]] = [((3, 4, 4, 40), None)]
    if kind.serves_v_prefix:
        plain.append(((3, 4, 1, 8), 6))
        quantised.append(plain[-1])
    sizes: list[tuple[tuple[int, ...], int | None, str | None]] = [(*size, None) for size in plain]
    sizes += [(*size, storage) for size in quantised for storage in sorted(kind.storages)]
    checks: list[Check] = []
    for dtype in dtypes:
        for shape, prefix, storage in sizes:
            words = [dtype, "x".join(map(str, shape)), f"v{prefix}" * bool(prefix), storage or ""]
            num_pages, page_size, heads, head_dim = shape
            layout = kind(
                num_pages, page_size, heads, head_dim, dtype, v_prefix_dim=prefix, storage=storage
            )
            run = functools.partial(check_layout, layout)
            checks.append((f"layout[{'-'.join(filter(None, words))}]", run))
    return checks


def check_layout(layout: KVLayout) -> None:
    """Raise AssertionError when a layout's shapes, writes or reads break the contract. The layout's
    shapes should be small.
    """
    shapes = layout.shapes()
    assert hash(layout) == hash(layout.resized()), f"{layout.name}: equal layouts must hash equally"
    assert set(shapes) == set(layout.head_axis()), (
        f"{layout.name}: shapes and head_axis name different arrays"
    )
    _check_axes(layout)
    count = layout.num_pages * layout.page_size
    order = np.random.default_rng(1).permutation(count).astype(np.int32)
    some = np.unique(np.array([0, layout.page_size - 1, count - 1], np.int32))
    everything, few = _tokens(layout, count, seed=2), _tokens(layout, some.size, seed=3)
    poisoned = poisoned_cache(layout)
    tokens = (order, *everything), (some, *few), _tokens(layout, 2, seed=4)
    done = jax.tree.map(np.asarray, _exercise(layout, poisoned, *tokens))
    _check_shapes(layout, done["made"])
    _check_equal(
        layout,
        done["written"][:, order],
        stacked(*everything),
        "reading returns other values than were written",
    )
    _check_equal(
        layout,
        done["tokens"],
        stacked(*everything),
        "read_tokens returns other values than were written",
    )
    _check_equal(
        layout,
        done["compact"],
        done["written"],
        "copying rows along offset_axis returns other tokens",
        exact=True,
    )
    for name, array in done["full"].items():
        assert array.tobytes() == done["again"][name].tobytes(), (
            f"{layout.name}: writing what read_exact returned changes {name}: a row that moves to "
            "another engine would change"
        )
    _check_only_slots_change(layout, done["before"], done["touched"], some, stacked(*few))
    _check_dropped_slots(layout, done["made"], done["dropped"])
    _check_page_shapes(layout, done["read"])


def poisoned_cache(layout: KVLayout) -> dict[str, np.ndarray]:
    """Return arrays full of NaN; arrays of integers are full of their largest value."""
    shapes = layout.shapes().items()
    is_float = {name: jnp.issubdtype(s.dtype, jnp.floating) for name, s in shapes}
    return {
        name: np.full(s.shape, np.nan if is_float[name] else jnp.iinfo(s.dtype).max, s.dtype)
        for name, s in shapes
    }


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _exercise(
    layout: KVLayout, poisoned: CacheArrays, everything: Any, few: Any, padding: tuple[Any, Any]
) -> dict[str, Any]:
    """Compute all that the checks compare, in one program.

    `made`: an empty cache. `before` and `touched`: contents of the poisoned cache before and after
    `few` was written. `written`: contents of an empty cache after `everything` was written, in slot
    order; `tokens`: the same by read_tokens, in the order of `everything`; `compact`: the same in a
    copy of all pages as one row. `dropped`: an empty cache after `padding` was written. `read`:
    pages of an empty cache. `full` and `again`: the arrays after `everything` was written, and
    after the result of read_exact was written to an empty cache.
    """
    full = layout.write(layout.init(), *everything)
    row = jnp.arange(layout.num_pages, dtype=jnp.int32)[None]
    small, copied = compact_rows(layout, full, row, layout.num_pages * layout.page_size)
    return {
        "made": layout.init(),
        "before": _contents(layout, poisoned),
        "touched": _contents(layout, layout.write(poisoned, *few)),
        "written": _contents(layout, full),
        "tokens": stacked(*layout.read_tokens(full, everything[0])),
        "full": full,
        "again": layout.write(
            layout.init(), everything[0], *layout.read_exact(full, everything[0])
        ),
        "compact": _contents(small, copied),
        "dropped": layout.write(layout.init(), jnp.full(2, -1, jnp.int32), *padding),
        "read": layout.read(layout.init(), jnp.zeros(PAGES_ASKED_FOR, jnp.int32)),
    }


def _tokens(layout: KVLayout, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (count, layout.num_kv_heads, layout.head_dim)
    k, v = (rng.normal(size=shape).astype(jnp.dtype(layout.dtype)) for _ in range(2))
    return k, k[..., : layout.v_prefix_dim] if layout.v_prefix_dim else v


def stacked(k: Any, v: Any) -> Any:
    """Return K and V [..., width] as one array [2, ..., head_dim]; narrower values are padded with
    zeros.
    """
    xp = np if isinstance(k, np.ndarray) else jnp
    missing = [(0, 0)] * (v.ndim - 1) + [(0, k.shape[-1] - v.shape[-1])]
    return xp.stack([k, xp.pad(v, missing)])


def _contents(layout: KVLayout, cache: CacheArrays) -> jax.Array:
    """Return K and V of every slot, [2, slots, kv_heads, head_dim]."""
    read = layout.read(cache, jnp.arange(layout.num_pages))
    shape = (layout.num_pages * layout.page_size, layout.num_kv_heads)
    return jnp.asarray(stacked(*(x.reshape(*shape, x.shape[-1]) for x in read)))


def _check_shapes(layout: KVLayout, made: dict[str, np.ndarray]) -> None:
    shapes, axes = layout.shapes(), layout.head_axis()
    assert set(shapes) == set(made), f"{layout.name}: shapes and init name different arrays"
    for name, shape in shapes.items():
        found = (made[name].shape, made[name].dtype)
        assert found == (shape.shape, shape.dtype), (
            f"{layout.name}: init made {found} for {name}, shapes says {shape}"
        )
        assert 0 <= axes[name] < len(shape.shape), (
            f"{layout.name}: head_axis of {name} is {axes[name]}"
        )
        assert shape.shape[0] == layout.num_pages, (
            f"{layout.name}: the first axis of {name} must be pages"
        )
    assert layout.num_bytes() == sum(stored_bytes(a.shape, a.dtype) for a in made.values()), (
        f"{layout.name}: num_bytes is wrong"
    )
    bigger = layout.resized(num_pages=layout.num_pages + 3)
    assert bigger.num_pages == layout.num_pages + 3, (
        f"{layout.name}: resized does not change num_pages"
    )


def _check_axes(layout: KVLayout) -> None:
    """Check that twice the heads lengthen only head_axis, and twice the tokens only offset_axis."""
    shapes = layout.shapes()
    for what, other, axis_of in (
        (
            "head_axis",
            dataclasses.replace(layout, num_kv_heads=2 * layout.num_kv_heads),
            layout.head_axis(),
        ),
        (
            "offset_axis",
            layout.resized(page_size=2 * layout.page_size),
            {n: layout.offset_axis_of(n) for n in shapes},
        ),
    ):
        for name, shape in other.shapes().items():
            grown = [
                i
                for i, (a, b) in enumerate(zip(shape.shape, shapes[name].shape, strict=True))
                if a != b
            ]
            assert grown == [axis_of[name]], (
                f"{layout.name}: {what} of {name} is {axis_of[name]}, but axes {grown} grow with it"
            )


def _check_equal(
    layout: KVLayout, got: np.ndarray, wanted: np.ndarray, what: str, *, exact: bool = False
) -> None:
    """Check that K and V [2, ..., heads, head_dim] have the layout's dtype and are equal within its
    tolerance.
    """
    dtype = jnp.dtype(layout.dtype)
    assert got.dtype == dtype, f"{layout.name}: reading returns {got.dtype}, expected {dtype}"
    left, right = got.astype(np.float64), wanted.astype(np.float64)
    if exact or layout.tolerance == 0:
        assert (left == right).all(), f"{layout.name}: {what}"
        return
    allowed = allowed_errors(layout, right)
    error = np.abs(left - right)
    assert (error <= allowed).all(), (
        f"{layout.name}: {what}: off by "
        f"{(error / np.abs(right).max(axis=-1, keepdims=True)).max():.3g} of the largest value"
        f" of a head, the layout's tolerance is {layout.tolerance:.3g}"
    )


def _check_only_slots_change(
    layout: KVLayout, before: np.ndarray, after: np.ndarray, slots: np.ndarray, new: np.ndarray
) -> None:
    """Check that poison stays bit by bit, except at the written slots, which hold the written
    values.
    """
    others = ~np.isin(np.arange(before.shape[1]), slots)
    is_same = np.array_equal(
        before[:, others].astype(np.float64), after[:, others].astype(np.float64), equal_nan=True
    )
    assert is_same, f"{layout.name}: a write changed other places than its slots"
    _check_equal(layout, after[:, slots], new, "a written slot does not hold what was written")


def _check_dropped_slots(
    layout: KVLayout, before: dict[str, np.ndarray], after: dict[str, np.ndarray]
) -> None:
    """Check that negative slots are padding: nothing is written for them."""
    for name, array in before.items():
        assert (after[name] == array).all(), (
            f"{layout.name}: a token with a negative slot was written"
        )


def _check_page_shapes(layout: KVLayout, read: tuple[np.ndarray, ...]) -> None:
    """Check that pages can be read by an array of page ids of any shape."""
    heads = (*PAGES_ASKED_FOR, layout.page_size, layout.num_kv_heads)
    widths = (layout.head_dim, layout.v_prefix_dim or layout.head_dim)
    for array, width in zip(read, widths, strict=True):
        shape = (*heads, width)
        assert array.shape == shape, f"{layout.name}: read returns {array.shape}, expected {shape}"


def allowed_errors(layout: KVLayout, written: np.ndarray) -> np.ndarray:
    """Return how much read values may differ from the heads `written` [..., head_dim], as f64
    [..., 1]: the tolerance of the layout plus, where it is not 0, the rounding to its dtype.
    """
    share = layout.tolerance and layout.tolerance + float(jnp.finfo(layout.dtype).eps)
    return share * np.abs(written.astype(np.float64)).max(axis=-1, keepdims=True, initial=0.0)


@functools.cache
def installed_layouts() -> dict[str, type[KVLayout]]:
    """Return the registered cache layouts, by name."""
    registry = load_registry()
    return {name: registry.load(registry.find("layout", name)) for name in registry.names("layout")}


def kept(
    layout: KVLayout, keys: Sequence[np.ndarray], values: Sequence[np.ndarray]
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Return f32 keys and values [tokens, kv_heads, head_dim] of all rows as the layout stores
    them: what the layout loses is not the error of a kernel that reads it.
    """
    ends = np.cumsum([len(row) for row in keys])
    if not layout.tolerance or not ends.size or not ends[-1]:
        return tuple(keys), tuple(values)
    pages = -(-int(ends[-1]) // layout.page_size)
    read = _written_and_read(
        layout.resized(num_pages=pages), np.concatenate(keys), np.concatenate(values)
    )
    k, v = (np.split(np.array(each), ends[:-1]) for each in read)
    return tuple(k), tuple(v)


@functools.partial(jax.jit, static_argnums=0)
def _written_and_read(layout: KVLayout, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    slots = jnp.arange(len(k), dtype=jnp.int32)
    return layout.read_exact(layout.write(layout.init(), slots, k, v), slots)
