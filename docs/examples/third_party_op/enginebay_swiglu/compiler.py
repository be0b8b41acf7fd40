"""Compiles the kernels for a CPU without running them, so that sizes whose arrays do not fit into
memory can be checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from enginebay_testing.toolchains import CompileReport


class HostCompiler:
    """XLA's compiler for the CPU of this machine."""

    targets = ("host",)
    platform = "cpu"

    def why_not(self, target: str) -> str | None:
        """Return None: XLA can always compile for the CPU."""

    def compile(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        *,
        target: str,
        donated: Sequence[int] = (),
        num_devices: int = 1,
    ) -> CompileReport:
        """Compile a program; see enginebay_testing.toolchains.KernelCompiler."""
        began_s = time.perf_counter()
        program = jax.jit(function, donate_argnums=tuple(donated)).lower(*arguments).compile()
        memory = program.memory_analysis()
        figures = {"temp_bytes": int(memory.temp_size_in_bytes)}
        return CompileReport(target, time.perf_counter() - began_s, figures)

    def devices(self, target: str, num_devices: int) -> Sequence[Any]:
        """Return CPU devices of this machine."""
        return jax.devices("cpu")[:num_devices]


compiler = HostCompiler()
