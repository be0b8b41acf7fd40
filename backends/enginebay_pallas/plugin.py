"""What this package offers: kernels for TPUs, written in Pallas."""

from __future__ import annotations

from enginebay.hooks import Register, hookimpl

COMPILER = "enginebay_pallas.compiler:compiler"


@hookimpl
def register_kernels(register: Register) -> None:
    """attention."""
    register(
        "pallas",
        "enginebay_pallas.attention:attention",
        op="attention",
        platforms=("tpu",),
        extra="tpu",
        summary="ragged paged attention that writes the new tokens itself",
        capabilities={"priority": 20, "compiler": COMPILER},
    )
