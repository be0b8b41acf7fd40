"""Registers the support for unregistered implementations."""

from __future__ import annotations

from enginebay.plugins.hooks import Register, hookimpl


@hookimpl
def register_by_hands(register: Register) -> None:
    """Register functions."""
    register(
        "functions",
        "enginebay.compose.given:GIVEN",
        summary="functions passed in Python and kernels by import path, after a quick check",
    )


@hookimpl
def register_revisions(register: Register) -> None:
    """Register import_paths."""
    register(
        "import_paths",
        "enginebay.compose.import_paths:check_import_paths",
        summary="a quick check of the kernels that were chosen by import path",
    )
