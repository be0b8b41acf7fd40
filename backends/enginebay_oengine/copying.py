"""PageCopier: copies pages within the cache, by one compiled program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.errors import CompilationError, explain
from enginebay.runner.runner import Runner

Cache = Mapping[str, Sequence[Mapping[str, jax.Array]]]


def copy_page(cache: Cache, source: jax.Array, target: jax.Array) -> Cache:
    """The cache with page `target` equal to page `source`, in every array; axis 0 of each counts
    pages.
    """
    return jax.tree.map(lambda array: array.at[target].set(array[source]), cache)


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
        page = jax.ShapeDtypeStruct((), jnp.int32)
        outputs = None
        if (
            runner.placement.mesh is not None
        ):  # donated arrays are reused only when they come back as they went
            outputs = jax.tree.map(lambda a: a.sharding, cache)
        lowered = jax.jit(copy_page, donate_argnums=0, out_shardings=outputs).lower(
            described, page, page
        )
        self._program = lowered.compile(compiler_options=runner.compile_options)
        runner.compilations.count += 1

    def __call__(self, copies: Sequence[tuple[int, int]]) -> None:
        """Launch copies (from, to)."""
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
        for source, target in copies:
            state = runner.state
            cache = self._program(state.cache, np.int32(source), np.int32(target))
            runner.state = dataclasses.replace(state, cache=cache)
