"""Conformance suite for cache layouts: what any KVLayout must do, asked through its public methods alone."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.cache import CacheArrays, KVLayout

PAGES_ASKED_FOR = (2, 3)
"""Shape of an array of pages."""


def check_layout(layout: KVLayout) -> None:
    """Raise AssertionError when a layout's shapes, writes or reads break the contract; shapes should be small."""
    shapes = layout.shapes()
    assert hash(layout) == hash(layout.resized()), f"{layout.name}: equal layouts must hash equally"
    assert set(shapes) == set(layout.head_axis()), (
        f"{layout.name}: shapes and head_axis name different arrays"
    )
    count = layout.num_pages * layout.page_size
    order = np.random.default_rng(1).permutation(count).astype(np.int32)
    some = np.unique(np.array([0, layout.page_size - 1, count - 1], np.int32))
    everything, few = _tokens(layout, count, seed=2), _tokens(layout, some.size, seed=3)
    poisoned = {name: np.full(s.shape, np.nan, s.dtype) for name, s in shapes.items()}
    done = _exercise(layout, poisoned, (order, *everything), (some, *few), _tokens(layout, 2, seed=4))
    made, _, written, touched, dropped, read = jax.tree.map(np.asarray, done)
    _check_shapes(layout, made)
    _check_round_trip(layout, written[:, order], np.stack(everything))
    _check_only_slots_change(layout, touched, some)
    _check_dropped_slots(layout, made, dropped)
    _check_page_shapes(layout, read)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _exercise(
    layout: KVLayout, poisoned: CacheArrays, everything: Any, few: Any, padding: tuple[Any, Any]
) -> tuple[Any, ...]:
    """All that is looked at, in one program.

    An empty cache; the poisoned one after `few` were written, and its contents; those of an empty one after
    `everything` was; an empty one after `padding` was; and pages of an empty one.
    """
    made = layout.init()
    after = layout.write(poisoned, *few)
    dropped = layout.write(layout.init(), jnp.full(2, -1, jnp.int32), *padding)
    read = layout.read(layout.init(), jnp.zeros(PAGES_ASKED_FOR, jnp.int32))
    written = _contents(layout, layout.write(layout.init(), *everything))
    return made, after, written, _contents(layout, after), dropped, read


def _tokens(layout: KVLayout, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (count, layout.num_kv_heads, layout.head_dim)
    k, v = (rng.normal(size=shape).astype(jnp.dtype(layout.dtype)) for _ in range(2))
    return k, v


def _contents(layout: KVLayout, cache: CacheArrays) -> jax.Array:
    """K and V of every slot, [2, slots, kv_heads, head_dim]."""
    read = layout.read(cache, jnp.arange(layout.num_pages))
    shape = (layout.num_pages * layout.page_size, layout.num_kv_heads, layout.head_dim)
    return jnp.stack([x.reshape(shape) for x in read])


def _check_shapes(layout: KVLayout, made: dict[str, np.ndarray]) -> None:
    shapes, axes = layout.shapes(), layout.head_axis()
    assert set(shapes) == set(made), f"{layout.name}: shapes and init name different arrays"
    for name, shape in shapes.items():
        found = (made[name].shape, made[name].dtype)
        assert found == (shape.shape, shape.dtype), (
            f"{layout.name}: init made {found} for {name}, shapes says {shape}"
        )
        assert 0 <= axes[name] < len(shape.shape), f"{layout.name}: head_axis of {name} is {axes[name]}"
        assert shape.shape[0] == layout.num_pages, f"{layout.name}: the first axis of {name} must be pages"
    assert layout.num_bytes() == sum(a.nbytes for a in made.values()), f"{layout.name}: num_bytes is wrong"
    bigger = layout.resized(num_pages=layout.num_pages + 3)
    assert bigger.num_pages == layout.num_pages + 3, f"{layout.name}: resized does not change num_pages"


def _check_round_trip(layout: KVLayout, got: np.ndarray, wanted: np.ndarray) -> None:
    """What was written at a slot is read at its page and offset, from whatever order it was written in."""
    assert (got == wanted).all(), f"{layout.name}: what is read is not what was written"


def _check_only_slots_change(layout: KVLayout, after: np.ndarray, slots: np.ndarray) -> None:
    """Poison stays poison, bit by bit, but at the slots written."""
    touched = np.isfinite(after.astype(np.float32)).all(axis=(0, 2, 3))
    untouched = np.isnan(after.astype(np.float32)).all(axis=(0, 2, 3))
    expected = np.isin(np.arange(touched.size), slots)
    assert (touched == expected).all(), f"{layout.name}: a written slot holds no finite value"
    assert (untouched == ~expected).all(), f"{layout.name}: a write changed places besides its slots"


def _check_dropped_slots(
    layout: KVLayout, before: dict[str, np.ndarray], after: dict[str, np.ndarray]
) -> None:
    """Negative slots are padding: nothing is written for them."""
    for name, array in before.items():
        assert (after[name] == array).all(), f"{layout.name}: a negative slot was written"


def _check_page_shapes(layout: KVLayout, read: tuple[np.ndarray, ...]) -> None:
    """Pages can be asked for in an array of any shape."""
    shape = (*PAGES_ASKED_FOR, layout.page_size, layout.num_kv_heads, layout.head_dim)
    for array in read:
        assert array.shape == shape, f"{layout.name}: read gives {array.shape}, expected {shape}"
