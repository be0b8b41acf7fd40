"""Registers the support for unregistered implementations."""

from __future__ import annotations

from enginebay.hooks import Register, hookimpl


@hookimpl
def register_by_hands(register: Register) -> None:
    """Register functions."""
    register(
        "functions",
        "enginebay_byhand.given:GIVEN",
        summary="functions passed in Python and kernels by import path, after a quick check",
    )
