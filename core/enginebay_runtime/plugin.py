"""Registers the executor that runs commands in this process, and shadow mode."""

from __future__ import annotations

from enginebay.plugins.hooks import Register, hookimpl


@hookimpl
def register_executors(register: Register) -> None:
    """Register `local`."""
    register(
        "local", "enginebay_runtime.local:LocalExecutor", summary="runs commands in this process"
    )


@hookimpl
def register_revisions(register: Register) -> None:
    """Register `shadow`."""
    register(
        "shadow",
        "enginebay.compose.shadowing:with_shadow",
        summary="a candidate that is compared with the chosen kernel on a share of the steps",
    )
