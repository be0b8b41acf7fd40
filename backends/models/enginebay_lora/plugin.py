"""Registers the op lora and its implementation in plain JAX."""

from __future__ import annotations

from enginebay.plugins.hooks import Register, hookimpl


@hookimpl
def register_ops(register: Register) -> None:
    """Register lora."""
    register(
        "lora", "enginebay_lora.ops:LORA", summary="the low-rank products of adapters, by token"
    )


@hookimpl
def register_kernels(register: Register) -> None:
    """Register lora in plain JAX."""
    register(
        "xla",
        "enginebay_lora.xla:lora",
        op="lora",
        summary="plain JAX, on any platform",
    )
