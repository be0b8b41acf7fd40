"""What this package offers: the executor that runs commands in this process."""

from __future__ import annotations

from enginebay.hooks import Register, hookimpl


@hookimpl
def register_executors(register: Register) -> None:
    """The one of this process."""
    register(
        "local", "enginebay_executor.local:LocalExecutor", summary="runs commands in this process"
    )
