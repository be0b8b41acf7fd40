"""PageMover: copies pages within the cache, and moves pages to the host and back."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.cache import CacheLayout
from enginebay.errors import CompilationError
from enginebay.executor.commands import CopyPages, PageIn, PageOut
from enginebay_executor.view import RunnerView

Cache = Mapping[str, Sequence[Mapping[str, jax.Array]]]


def copy_page(cache: Cache, pages: Mapping[str, jax.Array]) -> Cache:
    """Return the cache with one page copied to another in every array of each group.

    `pages[group]` is int32 (from, to). Axis 0 of each array counts pages. `pages` has the names of
    groups as keys, because JAX sorts the keys of the cache, so positions would be mixed up.
    """
    return {
        group: jax.tree.map(lambda a, pair=pages[group]: a.at[pair[1]].set(a[pair[0]]), layers)
        for group, layers in cache.items()
    }


@jax.jit
def _read_pages(layers: Sequence[Mapping[str, jax.Array]], pages: jax.Array) -> Any:
    return jax.tree.map(lambda array: array[pages], layers)


@functools.partial(jax.jit, donate_argnums=0)
def _write_pages(array: jax.Array, pages: jax.Array, values: jax.Array) -> jax.Array:
    return array.at[pages].set(values)


class PageMover:
    """Copies pages within the cache. Each copy is one launch, so copies run in order with the steps
    and with each other.
    """

    def __init__(self, runner: RunnerView) -> None:
        self._runner = runner
        self._programs: dict[tuple[CacheLayout, ...], Any] = {}

    def compile(self) -> Any:
        """The program that copies one page of each group, for the current cache; compiled once."""
        runner = self._runner
        key = tuple(runner.layouts.values())
        if key in self._programs:
            return self._programs[key]
        cache = runner.state.cache
        described = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), cache
        )
        pages = dict.fromkeys(cache, jax.ShapeDtypeStruct((2,), jnp.int32))
        outputs = None
        if runner.placement.mesh is not None:
            # Donated arrays are reused only when they are returned with the same sharding.
            outputs = jax.tree.map(lambda a: a.sharding, cache)
        copier = jax.jit(copy_page, donate_argnums=0, out_shardings=outputs)
        with runner.compilations.timed():
            lowered = copier.lower(described, pages)
            compiled = lowered.compile(compiler_options=runner.compile_options)
        self._programs[key] = compiled
        runner.compilations.add()
        return compiled

    def forget(self) -> None:
        """Free the programs."""
        self._programs.clear()

    def copy(self, command: CopyPages) -> None:
        """Launch copies. Each launch copies one page in every group; a group without further pages
        copies page 0 onto itself.
        """
        runner = self._runner
        if tuple(runner.layouts.values()) not in self._programs and runner.compilations.forbidden:
            raise CompilationError(
                "program not compiled: copy of a page",
                "programs that warmup() compiled",
                "Call warmup() first, or set forbid_compiling = false.",
            )
        program = self.compile()
        lists = [command.pages.get(group, ()) for group in runner.layouts]
        for pairs in itertools.zip_longest(*lists, fillvalue=(0, 0)):
            state = runner.state
            pages = dict(zip(runner.layouts, np.asarray(pairs, np.int32), strict=True))
            cache = program(state.cache, pages)
            runner.state = dataclasses.replace(state, cache=cache)

    def page_out(self, command: PageOut) -> Mapping[str, np.ndarray]:
        """The pages' content on the host, by "group/layer/array"."""
        return {
            f"{group}/{number}/{name}": np.asarray(array)
            for group, pages in command.pages.items()
            for number, layer in enumerate(_read_pages(self._runner.state.cache[group], pages))
            for name, array in layer.items()
        }

    def page_in(self, command: PageIn) -> None:
        """Write the result of a page_out to pages."""
        state = self._runner.state
        cache = {group: [dict(layer) for layer in layers] for group, layers in state.cache.items()}
        for place, values in command.arrays.items():
            group, number, name = place.rsplit("/", 2)
            layer = cache[group][int(number)]
            layer[name] = _write_pages(layer[name], command.pages[group], values)
        whole = {group: tuple(layers) for group, layers in cache.items()}
        self._runner.state = dataclasses.replace(state, cache=whole)
