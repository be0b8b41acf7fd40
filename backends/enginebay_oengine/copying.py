"""PageCopier: copies pages within the cache, by one compiled program."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.errors import CompilationError, explain
from enginebay.runner.runner import Runner
from enginebay_oengine.pool import DUMMY_PAGE

Cache = Mapping[str, Sequence[Mapping[str, jax.Array]]]


def copy_page(cache: Cache, source: jax.Array, target: jax.Array) -> Cache:
    """The cache with page target[i] equal to page source[i] in every array of group i, counted in
    the order of their names; axis 0 of each array counts pages.
    """

    def copied(i: int, group: str) -> Any:
        return jax.tree.map(lambda a: a.at[target[i]].set(a[source[i]]), cache[group])

    return {group: copied(i, group) for i, group in enumerate(sorted(cache))}


class PageCopier:
    """One copy is one launch: in order with the steps, and with the copies before it."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._program: Any = None

    def forget(self) -> None:
        """The cache has another size: what was compiled does not fit."""
        self._program = None

    def compile(self) -> None:
        """Compile the program, once."""
        if self._program is not None:
            return
        runner = self.runner
        cache = runner.state.cache
        described = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), cache
        )
        pages = jax.ShapeDtypeStruct((len(cache),), jnp.int32)
        outputs = None
        if (
            runner.placement.mesh is not None
        ):  # donated arrays are reused only when they come back as they went
            outputs = jax.tree.map(lambda a: a.sharding, cache)
        lowered = jax.jit(copy_page, donate_argnums=0, out_shardings=outputs).lower(
            described, pages, pages
        )
        self._program = lowered.compile(compiler_options=runner.compile_options)
        runner.compilations.count += 1

    def __call__(self, copies: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        """Launch copies (from, to) by cache group. A launch makes one in each group; a group that
        has none left copies the dummy page onto itself.
        """
        if not copies:
            return
        runner = self.runner
        if self._program is None and runner.compilations.forbidden:
            raise CompilationError(
                explain(
                    "program not compiled: copy of a page",
                    "programs that warmup() compiled",
                    "Call warmup() first, or allow compiling while serving.",
                )
            )
        self.compile()
        lists = [copies.get(group, ()) for group in sorted(runner.layouts)]
        for pairs in itertools.zip_longest(*lists, fillvalue=(DUMMY_PAGE, DUMMY_PAGE)):
            state = runner.state
            source, target = np.asarray(pairs, np.int32).T
            cache = self._program(state.cache, source, target)
            runner.state = dataclasses.replace(state, cache=cache)
