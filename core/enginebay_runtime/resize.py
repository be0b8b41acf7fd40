"""CacheMaker: allocates, resizes and frees the cache and the rows of an executor."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.cache import CacheLayout
from enginebay.contracts.cache_shape import CacheShape
from enginebay.contracts.commands import ClearPages, Drop, Grow, Make
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
        where, zeros = self._executor.placement.cache(layout), self._executor.parts.platform.zeros
        made = {}
        for name, shape in layout.shapes().items():
            how = shape.shape, jnp.dtype(shape.dtype), where[name]
            made[name] = zeros(*how, functools.partial(self._maker, how))
        return made

    def _maker(self, how: tuple[Any, ...], function: Callable[[], jax.Array]) -> Any:
        """The program of a function that makes an array (shape, dtype, sharding): `how`."""
        key = "zeros", *how
        if key not in self._programs:
            *_, where = how
            self._programs[key] = compiled_program(self._executor, key, function, (), outputs=where)
        return self._programs[key]

    def grow(self, command: Grow) -> None:
        """Replace the cache's arrays by larger ones, one after the other, so that only one exists
        twice. All entries of the page tables become 0.
        """
        executor = self._executor
        state, old_shapes = executor.state, executor.shapes
        without_cache = dataclasses.replace(state, cache={})
        remaining = {g: [dict(layer) for layer in layers] for g, layers in state.cache.items()}
        # Neither the executor nor this frame may hold the old layers while new ones are made.
        executor.state = None
        del state
        executor.set_layouts(command.shapes)
        cache = {}
        for group, layers in remaining.items():
            sizes = old_shapes[group], command.shapes[group]
            made = []
            while layers:
                layer, larger = layers.pop(0), self._empty(executor.layouts[group])
                made.append(
                    {
                        name: self._filled(larger.pop(name), layer.pop(name), *sizes)
                        for name in [*larger]
                    }
                )
            cache[group] = tuple(made)
        tables = executor.tables.whole()
        executor.state = dataclasses.replace(without_cache, cache=cache, tables=tables)

    def _filled(
        self, larger: jax.Array, array: jax.Array, old: CacheShape, new: CacheShape
    ) -> jax.Array:
        """`larger`, of the size `new`, with the content of an array of the size `old`. It is
        donated, so memory that the content does not need is not written.
        """
        key = "fill", old, new, larger.sharding, larger.shape, larger.dtype, array.shape
        if key not in self._programs:
            self._programs[key] = compiled_program(
                self._executor,
                key,
                functools.partial(_fill, old=old, new=new),
                (larger, array),
                donated=0,
                outputs=larger.sharding,
            )
        made: jax.Array = self._programs[key](larger, array)
        return made

    def clear(self, command: ClearPages) -> None:
        """Make pages of the cache zeros, in place, and give their memory back."""
        executor = self._executor
        jax.block_until_ready(executor.state)
        for group, pages in command.pages.items():
            ids = np.unique(pages)
            runs = np.split(ids, np.flatnonzero(np.diff(ids) > 1) + 1)
            for array in jax.tree.leaves(executor.state.cache[group]):
                for run in runs:
                    executor.parts.platform.clear(array, int(run[0]), int(run[-1]) + 1)

    def drop(self, _: Drop) -> None:
        """Free the cache and the rows; the weights stay."""
        self._executor.state = None


def _fill(larger: jax.Array, array: jax.Array, *, old: CacheShape, new: CacheShape) -> jax.Array:
    slots = larger.reshape(new.num_slots, new.pages_per_slot, *larger.shape[1:])
    kept = array.reshape(old.num_slots, old.pages_per_slot, *array.shape[1:])
    filled = jax.lax.dynamic_update_slice(slots, kept, (0,) * slots.ndim)
    return filled.reshape(larger.shape)
