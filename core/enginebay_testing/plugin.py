"""Registers the command `check`."""

from __future__ import annotations

from enginebay.plugins.hooks import Register, hookimpl


@hookimpl
def register_commands(register: Register) -> None:
    """Register check."""
    register(
        "check",
        "enginebay_testing.cli:COMMAND",
        summary="run the conformance suites of registered parts, each case in a process of its own",
    )
