"""Registers the program and the commands that users and plugin authors need first."""

from __future__ import annotations

from enginebay.plugins.hooks import Register, hookimpl


@hookimpl
def register_commands(register: Register) -> None:
    """Register generate, embed, chat, plugins, explain, config, env and new."""
    register("generate", "enginebay.cli.generate:COMMAND", summary="complete a prompt")
    register(
        "embed",
        "enginebay.cli.embed:COMMAND",
        summary="print the pooled hidden states of texts",
    )
    register("chat", "enginebay.cli.chat:COMMAND", summary="talk with a model")
    register(
        "plugins",
        "enginebay.cli.plugins:COMMAND",
        summary="list all installed parts, and why a part cannot be used",
        capabilities={"without_jax": True},
    )
    register(
        "explain",
        "enginebay.cli.info:COMMAND",
        summary="show what a configuration chooses, and why",
    )
    register(
        "config",
        "enginebay.cli.info:COMMAND",
        summary="show a configuration in full, or the schema of configurations",
        capabilities={"without_jax": True},
    )
    register(
        "env",
        "enginebay.cli.info:COMMAND",
        summary="show versions and devices, for a bug report",
    )
    register(
        "new",
        "enginebay.cli.new:COMMAND",
        summary="write a plugin to start from: a kernel, scheduler, sampler, processor, proposer, "
        "platform or engine",
    )
