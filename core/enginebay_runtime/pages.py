"""PageMover: copies pages within the cache, and moves pages to the host and back."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.commands import CopyPages, PageIn, PageOut
from enginebay.errors import CompilationError
from enginebay_runtime.small_programs import compiled_program
from enginebay_runtime.view import ExecutorView

Layers = Sequence[Mapping[str, jax.Array]]
Cache = Mapping[str, Layers]

COPY = "copy"
READ = "read"
WRITE = "write"


def copy_page(cache: Cache, pages: Mapping[str, jax.Array]) -> Cache:
    """Return the cache with one page copied to another in every array of each group.

    `pages[group]` is int32 (from, to). Axis 0 of each array counts pages. `pages` has the names of
    groups as keys, because JAX sorts the keys of the cache, so positions would be mixed up.
    """
    return {
        group: jax.tree.map(lambda a, pair=pages[group]: a.at[pair[1]].set(a[pair[0]]), layers)
        for group, layers in cache.items()
    }


def read_group(layers: Layers, pages: jax.Array) -> Layers:
    """Return the pages int32 [n] of a group's arrays, [n, ...]."""
    return jax.tree.map(lambda array: array[pages], layers)


def write_group(layers: Layers, pages: jax.Array, values: Layers) -> Layers:
    """Return a group's arrays with `values` [n, ...] at the pages int32 [n]."""
    return jax.tree.map(lambda array, new: array.at[pages].set(new), layers, values)


class PageMover:
    """Copies pages within the cache. Each copy is one launch, so copies run in order with the steps
    and with each other.
    """

    def __init__(self, executor: ExecutorView) -> None:
        self._executor = executor
        self._programs: dict[tuple[Any, ...], Any] = {}

    def compile(self) -> None:
        """Compile the program that copies one page of each group, for the current cache."""
        self._copier()

    def _copier(self) -> Any:
        cache = self._executor.state.cache
        pages = dict.fromkeys(cache, jax.ShapeDtypeStruct((2,), jnp.int32))
        return self._compiled((COPY,), copy_page, (cache, pages), returns=cache)

    def _reader(self, group: str, num: int) -> Any:
        layers, pages = self._executor.state.cache[group], jax.ShapeDtypeStruct((num,), jnp.int32)
        return self._compiled((READ, group, num), read_group, (layers, pages))

    def _writer(self, group: str, num: int) -> Any:
        layers, pages = self._executor.state.cache[group], jax.ShapeDtypeStruct((num,), jnp.int32)
        values = jax.tree.map(lambda a: jax.ShapeDtypeStruct((num, *a.shape[1:]), a.dtype), layers)
        name = (WRITE, group, num)
        return self._compiled(name, write_group, (layers, pages, values), returns=layers)

    def _compiled(
        self, name: tuple[Any, ...], function: Any, arguments: tuple[Any, ...], returns: Any = None
    ) -> Any:
        """The program of a function for the current cache; compiled once. `returns`: the first
        argument, if the function returns it changed; it is then donated.
        """
        executor = self._executor
        key = (*name, *executor.layouts.values())
        if key in self._programs:
            return self._programs[key]
        outputs = None
        if executor.placement.mesh is not None and returns is not None:
            # Donated arrays are reused only when they are returned with the same sharding.
            outputs = jax.tree.map(lambda a: a.sharding, returns)
        donated = () if returns is None else (0,)
        compiled = compiled_program(
            executor, name, function, arguments, donated=donated, outputs=outputs
        )
        self._programs[key] = compiled
        executor.compilations.add()
        return compiled

    def forget(self) -> None:
        """Free the programs."""
        self._programs.clear()

    def copy(self, command: CopyPages) -> None:
        """Launch copies. Each launch copies one page in every group; a group without further pages
        copies page 0 onto itself.
        """
        executor = self._executor
        # Programs that read and write pages may be compiled: tools move pages in any number.
        if (
            executor.compilations.forbidden
            and (COPY, *executor.layouts.values()) not in self._programs
        ):
            raise CompilationError(
                "program not compiled: copy of a page",
                "programs that warmup() compiled",
                "Call warmup() first, or set forbid_compiling = false.",
            )
        program = self._copier()
        lists = [command.pages.get(group, ()) for group in executor.layouts]
        for pairs in itertools.zip_longest(*lists, fillvalue=(0, 0)):
            state = executor.state
            pages = dict(zip(executor.layouts, np.asarray(pairs, np.int32), strict=True))
            cache = program(state.cache, pages)
            executor.state = dataclasses.replace(state, cache=cache)

    def page_out(self, command: PageOut) -> Mapping[str, jax.Array]:
        """The pages' content by "group/layer/array". The copy to the host is under way."""
        found: dict[str, jax.Array] = {}
        for group, pages in command.pages.items():
            read = self._reader(group, len(pages))(self._executor.state.cache[group], pages)
            for number, layer in enumerate(read):
                for name, array in layer.items():
                    array.copy_to_host_async()
                    found[f"{group}/{number}/{name}"] = array
        return found

    def page_in(self, command: PageIn) -> None:
        """Write the result of a page_out to pages."""
        executor = self._executor
        for group, pages in command.pages.items():
            layers = executor.state.cache[group]
            values = tuple(
                {name: np.asarray(command.arrays[f"{group}/{number}/{name}"]) for name in layer}
                for number, layer in enumerate(layers)
            )
            written = self._writer(group, len(pages))(layers, pages, values)
            cache = {**executor.state.cache, group: written}
            executor.state = dataclasses.replace(executor.state, cache=cache)
