"""Conformance suite for cache layouts: what any KVLayout must do, asked through its public methods alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.cache import KVLayout


def check_layout(layout: KVLayout) -> None:
    """Raise AssertionError when a layout's shapes, writes or reads break the contract; shapes should be small."""
    _check_shapes(layout)
    _check_round_trip(layout)
    _check_only_slots_change(layout)
    _check_dropped_slots(layout)
    _check_page_shapes(layout)


def _tokens(layout: KVLayout, count: int, seed: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    shape = (count, layout.num_kv_heads, layout.head_dim)
    k, v = (jnp.asarray(rng.normal(size=shape).astype(jnp.dtype(layout.dtype))) for _ in range(2))
    return k, v


def _contents(layout: KVLayout, cache: dict[str, jax.Array]) -> np.ndarray:
    """K and V of every slot, [2, slots, kv_heads, head_dim]."""
    read = layout.read(cache, jnp.arange(layout.num_pages))
    shape = (layout.num_pages * layout.page_size, layout.num_kv_heads, layout.head_dim)
    return np.stack([np.asarray(x).reshape(shape) for x in read])


def _check_shapes(layout: KVLayout) -> None:
    shapes, axes, cache = layout.shapes(), layout.head_axis(), layout.init()
    assert hash(layout) == hash(layout.resized()), f"{layout.name}: equal layouts must hash equally"
    assert set(shapes) == set(axes) == set(cache), (
        f"{layout.name}: shapes, head_axis and init name different arrays"
    )
    for name, shape in shapes.items():
        made = (cache[name].shape, cache[name].dtype)
        assert made == (shape.shape, shape.dtype), (
            f"{layout.name}: init made {made} for {name}, shapes says {shape}"
        )
        assert 0 <= axes[name] < len(shape.shape), f"{layout.name}: head_axis of {name} is {axes[name]}"
        assert shape.shape[0] == layout.num_pages, f"{layout.name}: the first axis of {name} must be pages"
    assert layout.num_bytes() == sum(a.nbytes for a in cache.values()), f"{layout.name}: num_bytes is wrong"
    bigger = layout.resized(num_pages=layout.num_pages + 3)
    assert bigger.num_pages == layout.num_pages + 3, f"{layout.name}: resized does not change num_pages"


def _check_round_trip(layout: KVLayout) -> None:
    """What was written at a slot is read at its page and offset, from whatever order it was written in."""
    count = layout.num_pages * layout.page_size
    slots = np.random.default_rng(1).permutation(count).astype(np.int32)
    k, v = _tokens(layout, count, seed=2)
    cache = jax.jit(layout.write, donate_argnums=0)(layout.init(), jnp.asarray(slots), k, v)
    got = _contents(layout, cache)[:, slots]
    assert (got == np.stack([np.asarray(k), np.asarray(v)])).all(), (
        f"{layout.name}: what is read is not what was written"
    )


def _check_only_slots_change(layout: KVLayout) -> None:
    """Poison stays poison, bit by bit, but at the slots written."""
    poisoned = {name: jnp.full(s.shape, jnp.nan, s.dtype) for name, s in layout.shapes().items()}
    slots = np.array([0, layout.page_size - 1, layout.num_pages * layout.page_size - 1], np.int32)
    slots = np.unique(slots)
    k, v = _tokens(layout, slots.size, seed=3)
    after = _contents(layout, layout.write(poisoned, jnp.asarray(slots), k, v))
    touched = np.isfinite(after.astype(np.float32)).all(axis=(0, 2, 3))
    untouched = np.isnan(after.astype(np.float32)).all(axis=(0, 2, 3))
    expected = np.isin(np.arange(touched.size), slots)
    assert (touched == expected).all(), f"{layout.name}: a written slot holds no finite value"
    assert (untouched == ~expected).all(), f"{layout.name}: a write changed places besides its slots"


def _check_dropped_slots(layout: KVLayout) -> None:
    """Negative slots are padding: nothing is written for them."""
    k, v = _tokens(layout, 2, seed=4)
    before = layout.init()
    after = layout.write(before, jnp.asarray([-1, -1], jnp.int32), k, v)
    for name, array in before.items():
        assert (np.asarray(after[name]) == np.asarray(array)).all(), (
            f"{layout.name}: a negative slot was written"
        )


def _check_page_shapes(layout: KVLayout) -> None:
    """Pages can be asked for in an array of any shape."""
    pages = jnp.zeros((2, 3), jnp.int32)
    shape = (2, 3, layout.page_size, layout.num_kv_heads, layout.head_dim)
    for array in layout.read(layout.init(), pages):
        assert array.shape == shape, f"{layout.name}: read gives {array.shape}, expected {shape}"
