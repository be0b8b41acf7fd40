"""Registers the commands bench, compare, roofline, tune and eval."""

from __future__ import annotations

from enginebay.plugins.hooks import Register, hookimpl


@hookimpl
def register_commands(register: Register) -> None:
    """Register bench, compare, roofline, tune and eval."""
    register(
        "bench",
        "enginebay_bench.cli.bench:COMMAND",
        summary="measure engines side by side, every implementation of an op, or a server",
    )
    register(
        "compare",
        "enginebay_bench.cli.compare:COMMAND",
        summary="engines, kernels and other programs side by side: tokens first, then speed",
    )
    register(
        "roofline",
        "enginebay_bench.cli.roofline:COMMAND",
        summary="the measured rates of this machine: bytes and operations per second",
    )
    register(
        "tune",
        "enginebay_bench.cli.tune:COMMAND",
        summary="search for the fastest configurations of kernels on this machine",
    )
    register(
        "eval",
        "enginebay_bench.cli.eval:COMMAND",
        summary="compare a configuration with a reference on a text: perplexity, KL divergence, "
        "greedy tokens",
    )
