"""cjit: compiles a jitted function ahead of its call, once per combination of argument shapes, and
counts the compilations.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from enginebay.contracts.compilations import Compilations
from enginebay.errors import CompilationError
from enginebay.memory_maps import require_maps


def cjit(
    function: Any,
    *,
    static_argnums: Sequence[int] = (),
    compile_options: Mapping[str, Any] | None = None,
    compilations: Compilations | None = None,
) -> CompiledOnce:
    """Return `function` as a CompiledOnce. `function` is the result of jax.jit with the same
    `static_argnums`.

    `compile_options` are XLA's options. `compilations` counts the compilations and may forbid them.
    """
    return CompiledOnce(function, tuple(static_argnums), dict(compile_options or {}), compilations)


class CompiledOnce:
    """A function of positional arguments with a compiled program for each combination of its static
    arguments (compared by ==) and its arrays' shapes, dtypes and shardings.
    """

    def __init__(
        self,
        function: Any,
        static_argnums: tuple[int, ...],
        compile_options: dict[str, Any],
        compilations: Compilations | None,
    ) -> None:
        self.function = function
        self.static_argnums = static_argnums
        self.compile_options = compile_options
        self.compilations = Compilations() if compilations is None else compilations
        self._programs: dict[Any, Any] = {}
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        """Return the function's result. CompilationError when a program is missing and compiling is
        forbidden.
        """
        statics, arrays = self._split(args)
        leaves, structure = jax.tree.flatten(arrays)
        key = (statics, structure, tuple(map(_kind, leaves)))
        program = self._programs.get(key)
        if program is None:
            program = self._compile(key, args)
        return program(*arrays)

    @property
    def num_programs(self) -> int:
        """Number of programs compiled so far."""
        return len(self._programs)

    def forget(self, static: Any) -> None:
        """Drop the programs that were compiled for a static argument."""
        with self._lock:
            self._programs = {key: p for key, p in self._programs.items() if static not in key[0]}

    def _split(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Any]]:
        statics = tuple(args[i] for i in self.static_argnums)
        return statics, [arg for i, arg in enumerate(args) if i not in self.static_argnums]

    def _compile(self, key: Any, args: tuple[Any, ...]) -> Any:
        """Compile a program; threads that need the same program wait for one compilation."""
        with self._lock:
            if key in self._programs:
                return self._programs[key]
            if self.compilations.forbidden:
                raise CompilationError(
                    "arguments without a compiled program",
                    "shapes that were used before compiling was forbidden",
                    "Call it once with these shapes before, or allow compiling.",
                )
            require_maps("a function for new shapes")
            with self.compilations.timed():
                lowered = self.function.lower(*args)
                program = lowered.compile(compiler_options=self.compile_options)
            self._programs[key] = program
            self.compilations.add()
            return program


def _kind(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, leaf.sharding
    value = np.asarray(leaf)
    return value.shape, value.dtype, None
