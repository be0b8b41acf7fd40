"""What this package offers: the command `check`."""

from __future__ import annotations

from enginebay.hooks import Register, hookimpl


@hookimpl
def register_commands(register: Register) -> None:
    """check."""
    register(
        "check",
        "enginebay_testing.cli:COMMAND",
        summary="hold registered parts to their contracts, each case in a process of its own",
    )
