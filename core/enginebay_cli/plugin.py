"""Registers the program and the commands that users and plugin authors need first."""

from __future__ import annotations

from collections.abc import Sequence

from enginebay.hooks import Register, hookimpl


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; `enginebay.cli.main` calls this function."""
    from enginebay_cli.main import main as run

    return run(argv)


@hookimpl
def register_commands(register: Register) -> None:
    """Register generate, embed, chat, plugins, explain, config, env and new."""
    register("generate", "enginebay_cli.generate:COMMAND", summary="complete a prompt")
    register(
        "embed",
        "enginebay_cli.embed:COMMAND",
        summary="print the pooled hidden states of texts",
    )
    register("chat", "enginebay_cli.chat:COMMAND", summary="talk with a model")
    register(
        "plugins",
        "enginebay_cli.plugins:COMMAND",
        summary="list all installed parts, and why a part cannot be used",
        capabilities={"without_jax": True},
    )
    register(
        "explain",
        "enginebay_cli.inform:COMMAND",
        summary="show what a configuration chooses, and why",
    )
    register(
        "config",
        "enginebay_cli.inform:COMMAND",
        summary="show a configuration in full, or the schema of configurations",
        capabilities={"without_jax": True},
    )
    register(
        "env",
        "enginebay_cli.inform:COMMAND",
        summary="show versions and devices, for a bug report",
    )
    register(
        "new",
        "enginebay_cli.new:COMMAND",
        summary="write a plugin to start from: a kernel, scheduler, sampler, processor, proposer, "
        "platform or engine",
    )
