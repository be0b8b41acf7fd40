"""Registers the command `serve`."""

from __future__ import annotations

from enginebay.plugins.hooks import Register, hookimpl


@hookimpl
def register_commands(register: Register) -> None:
    """Register serve."""
    register(
        "serve",
        "enginebay_server.command:COMMAND",
        summary="answer HTTP requests in the form of OpenAI's API",
    )
