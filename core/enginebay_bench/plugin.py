"""What this package offers: the commands bench, tune and eval, and tables of what was tuned."""

from __future__ import annotations

from enginebay.hooks import Register, hookimpl


@hookimpl
def register_tunings(register: Register) -> None:
    """tables."""
    register(
        "tables",
        "enginebay_bench.table_files:tables_of",
        summary="tables of the fastest configurations: the user's, and those that packages bring",
    )


@hookimpl
def register_commands(register: Register) -> None:
    """bench, tune and eval."""
    register(
        "bench",
        "enginebay_bench.cli.bench:COMMAND",
        summary="measure engines side by side, or every implementation of an op",
    )
    register(
        "tune",
        "enginebay_bench.cli.tune:COMMAND",
        summary="search the fastest configurations of kernels on this machine",
    )
    register(
        "eval",
        "enginebay_bench.cli.eval:COMMAND",
        summary="hold a configuration against a reference on a text: perplexity, KL divergence, "
        "greedy tokens",
    )
