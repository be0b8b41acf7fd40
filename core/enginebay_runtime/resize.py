"""CacheMaker: allocates, resizes and frees the cache and the rows of an executor."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from enginebay.contracts.cache import CacheLayout, KVLayout
from enginebay.contracts.cache_shape import CacheShape
from enginebay.contracts.commands import Drop, Grow, Make
from enginebay.contracts.processor import Sizes
from enginebay_runtime.device import DeviceRows
from enginebay_runtime.processing import empty_rows
from enginebay_runtime.row_writer import RowWriter
from enginebay_runtime.small_programs import compiled_program
from enginebay_runtime.step import StepState
from enginebay_runtime.view import ExecutorView


class CacheMaker:
    """Allocates the arrays of an executor's step state."""

    def __init__(self, executor: ExecutorView, writer: RowWriter) -> None:
        self._executor, self._writer = executor, writer
        self._programs: dict[tuple[object, ...], Any] = {}

    def make(self, command: Make) -> None:
        """Allocate an empty cache and rows that are all finished. The first time, also load the
        weights.
        """
        executor = self._executor
        if not executor.model_weights:
            executor.model_weights = executor.parts.load_weights()
        executor.set_layouts(command.shapes)
        cache = {
            group.name: tuple(
                self._empty(executor.layouts[group.name]) for _ in range(group.num_layers)
            )
            for group in executor.info.cache_groups
        }
        sizes = Sizes(executor.info.vocab_size, executor.max_model_len)
        adapts = executor.parts.adapters is not None
        rows = DeviceRows.empty(executor.num_rows, executor.max_model_len, adapts=adapts)
        fields = empty_rows(executor.parts.processors, executor.num_rows, sizes)
        rows, fields = jax.device_put((rows, fields), executor.placement.replicated)
        executor.state = StepState(cache, rows, fields, executor.tables.whole())
        self._writer.forget()

    def _empty(self, layout: CacheLayout) -> dict[str, jax.Array]:
        """The arrays of one layer, filled with zeros."""
        where = self._executor.placement.cache(layout)
        return {n: self._zeros(s.shape, s.dtype, where[n]) for n, s in layout.shapes().items()}

    def _zeros(self, shape: tuple[int, ...], dtype: Any, where: Sharding) -> jax.Array:
        """An array of zeros. All layers share the program that makes one."""

        def zeros() -> jax.Array:
            return jnp.zeros(shape, dtype)

        key = "zeros", shape, jnp.dtype(dtype), where
        if key not in self._programs:
            self._programs[key] = compiled_program(self._executor, key, zeros, (), outputs=where)
        made: jax.Array = self._programs[key]()
        return made

    def grow(self, command: Grow) -> None:
        """Replace the cache's arrays by larger ones, one after the other, so that only one exists
        twice. All entries of the page tables become 0.
        """
        executor = self._executor
        state, old_shapes, old_layouts = executor.state, executor.shapes, executor.layouts
        without_cache = dataclasses.replace(state, cache={})
        remaining = {g: [dict(layer) for layer in layers] for g, layers in state.cache.items()}
        # Neither the executor nor this frame may hold the old layers while new ones are made.
        executor.state = None
        del state
        executor.set_layouts(command.shapes)
        cache = {}
        for group, layers in remaining.items():
            old = old_layouts[group]
            sizes = old_shapes[group], command.shapes[group]
            where = executor.placement.cache(executor.layouts[group])
            made = []
            while layers:
                layer = layers.pop(0)
                made.append(
                    {
                        name: self._resized(
                            layer.pop(name), *sizes, _offset_axis(old, name), where[name]
                        )
                        for name in list(layer)
                    }
                )
            cache[group] = tuple(made)
        tables = executor.tables.whole()
        executor.state = dataclasses.replace(without_cache, cache=cache, tables=tables)

    def _resized(
        self,
        array: jax.Array,
        old: CacheShape,
        new: CacheShape,
        offset_axis: int | None,
        where: Sharding,
    ) -> jax.Array:
        key = "resize", old, new, offset_axis, where, array.shape, array.dtype
        if key not in self._programs:
            resize = functools.partial(_resize, old=old, new=new, offset_axis=offset_axis)
            self._programs[key] = compiled_program(
                self._executor, key, resize, (array,), outputs=where
            )
        made: jax.Array = self._programs[key](array)
        return made

    def drop(self, _: Drop) -> None:
        """Free the cache and the rows; the weights stay."""
        self._executor.state = None


def _offset_axis(layout: CacheLayout, array: str) -> int | None:
    """The axis of an array that counts tokens of a page; None: no axis does."""
    return layout.offset_axis_of(array) if isinstance(layout, KVLayout) else None


def _resize(
    array: jax.Array, *, old: CacheShape, new: CacheShape, offset_axis: int | None
) -> jax.Array:
    """[slots * pages, ..., page_size at offset_axis, ...] padded with zeros to the new size.
    offset_axis None: no axis counts the tokens of a page.
    """
    slots = array.reshape(old.num_slots, old.pages_per_slot, *array.shape[1:])
    padding = [(0, 0)] * slots.ndim
    padding[0] = (0, new.num_slots - old.num_slots)
    padding[1] = (0, new.pages_per_slot - old.pages_per_slot)
    if offset_axis is not None:
        padding[1 + offset_axis] = (0, new.page_size - old.page_size)
    padded = jnp.pad(slots, padding)
    return padded.reshape(new.num_pages, *padded.shape[2:])
