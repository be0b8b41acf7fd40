"""What this package offers: kernels for NVIDIA GPUs, written in Triton and called through jax-triton."""

from __future__ import annotations

from enginebay.hooks import Register, hookimpl


@hookimpl
def register_kernels(register: Register) -> None:
    """attention."""
    register(
        "triton",
        "enginebay_triton.attention:attention",
        op="attention",
        platforms=("cuda",),
        requires=("triton", "jax_triton"),
        extra="gpu",
        summary="paged attention on NVIDIA GPUs: split decode, ragged prefill and mixed steps",
        capabilities={
            "priority": 10,
            "custom_calls": ("triton_kernel_call", "triton_kernel_call_ffi"),
            "compiler": "enginebay_triton.compiler:compiler",
        },
    )
