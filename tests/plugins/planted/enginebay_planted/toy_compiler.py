"""A compiler for a device that is nowhere: XLA's for the CPU under another name, and a target
without a tool chain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from enginebay_testing.toolchains import CompileReport


class ToyCompiler:
    """Compiles for npu1; npu2 lacks its tools."""

    targets = ("npu1", "npu2")
    platform = "npu"

    def why_not(self, target: str) -> str | None:
        return "npu2 needs a tool chain that nobody has" if target == "npu2" else None

    def compile(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        *,
        target: str,
        donated: Sequence[int] = (),
        num_devices: int = 1,
    ) -> CompileReport:
        start = time.perf_counter()
        compiled = jax.jit(function, donate_argnums=tuple(donated)).lower(*arguments).compile()
        memory = compiled.memory_analysis()
        figures = {
            "alias_bytes": int(memory.alias_size_in_bytes),
            "temp_bytes": int(memory.temp_size_in_bytes),
        }
        return CompileReport(target, time.perf_counter() - start, figures)

    def devices(self, target: str, num_devices: int) -> Sequence[Any]:
        return jax.devices()[:num_devices]


compiler = ToyCompiler()
