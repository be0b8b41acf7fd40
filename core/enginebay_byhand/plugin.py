"""What this package offers: implementations that nobody registered."""

from __future__ import annotations

from enginebay.hooks import Register, hookimpl


@hookimpl
def register_by_hands(register: Register) -> None:
    """functions."""
    register(
        "functions",
        "enginebay_byhand.given:GIVEN",
        summary="functions given in Python and kernels by import path, after a quick check",
    )
