"""Registers the commands bench, tune and eval, and the tables of tuned configurations."""

from __future__ import annotations

from enginebay.plugins.hooks import Register, hookimpl


@hookimpl
def register_tunings(register: Register) -> None:
    """Register tables."""
    register(
        "tables",
        "enginebay.compose.tuned_files:tables_of",
        summary="tables of the fastest configurations, of the user and of packages",
    )


@hookimpl
def register_commands(register: Register) -> None:
    """Register bench, tune and eval."""
    register(
        "bench",
        "enginebay_bench.cli.bench:COMMAND",
        summary="measure engines side by side, every implementation of an op, or a server",
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
