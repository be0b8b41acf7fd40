"""Registers the executor that runs commands in this process."""

from __future__ import annotations

from enginebay.plugins.hooks import Register, hookimpl


@hookimpl
def register_executors(register: Register) -> None:
    """Register `local`."""
    register(
        "local", "enginebay_runtime.local:LocalExecutor", summary="runs commands in this process"
    )
