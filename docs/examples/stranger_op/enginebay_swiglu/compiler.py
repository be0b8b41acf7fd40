"""Compiles the kernels for a processor without running them, at sizes whose arrays would not fit a
small machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from enginebay.ops.toolchains import CompileReport


class HostCompiler:
    """XLA's compiler for the processor at hand."""

    targets = ("host",)
    platform = "cpu"

    def why_not(self, target: str) -> str | None:
        """None: XLA always has it."""

    def compile(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        *,
        target: str,
        donated: Sequence[int] = (),
        num_devices: int = 1,
    ) -> CompileReport:
        """As enginebay.ops.toolchains.KernelCompiler says."""
        began_s = time.perf_counter()
        program = jax.jit(function, donate_argnums=tuple(donated)).lower(*arguments).compile()
        memory = program.memory_analysis()
        figures = {"temp_bytes": int(memory.temp_size_in_bytes)}
        return CompileReport(target, time.perf_counter() - began_s, figures)

    def devices(self, target: str, num_devices: int) -> Sequence[Any]:
        """Processors of this machine."""
        return jax.devices("cpu")[:num_devices]


compiler = HostCompiler()
