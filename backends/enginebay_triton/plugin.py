"""What this package offers: kernels for NVIDIA GPUs, written in Triton and called through jax-triton."""

from __future__ import annotations

from enginebay.hooks import Register, hookimpl


@hookimpl
def register_kernels(register: Register) -> None:
    """None yet."""
