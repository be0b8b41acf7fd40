"""What this package offers: kernels for TPUs, written in Pallas."""

from __future__ import annotations

from enginebay.hooks import Register, hookimpl


@hookimpl
def register_kernels(register: Register) -> None:
    """None yet."""
