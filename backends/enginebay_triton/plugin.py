"""What this package offers: kernels for NVIDIA GPUs, written in Triton and called through
jax-triton, and cuDNN's prefill.
"""

from __future__ import annotations

from typing import Any

from enginebay.hooks import Register, hookimpl

REQUIRES = ("triton", "jax_triton")
CAPABILITIES: dict[str, Any] = {
    "priority": 10,
    "compiler": "enginebay_triton.compiler:compiler",
    "custom_calls": ("triton_kernel_call", "triton_kernel_call_ffi"),
}


@hookimpl
def register_kernels(register: Register) -> None:
    """Attention, first-chunk prefill, and the ops around attention."""
    register(
        "triton",
        "enginebay_triton.attention:attention",
        op="attention",
        platforms=("cuda",),
        requires=REQUIRES,
        extra="gpu",
        summary="paged attention on NVIDIA GPUs: split decode, ragged prefill and mixed steps",
        capabilities=CAPABILITIES,
    )
    register(
        "triton_flash",
        "enginebay_triton.flash:triton_flash",
        op="attention",
        platforms=("cuda",),
        requires=REQUIRES,
        extra="gpu",
        summary="first chunks of prompts from their own keys and values",
        capabilities=CAPABILITIES,
    )
    register(
        "cudnn",
        "enginebay_triton.cudnn:cudnn",
        op="attention",
        platforms=("cuda",),
        extra="gpu",
        summary="first chunks of prompts by cuDNN's fused kernel, through jax.nn",
    )
    _register_plain(register)


def _register_plain(register: Register) -> None:
    targets = {
        "rms_norm": ("norm:rms_norm", "rows read and written once"),
        "add_rms_norm": ("norm:add_rms_norm", "a residual sum and its norm in one"),
        "grouped_linear": (
            "grouped:grouped_linear",
            "blocks of one group's rows, by its weight alone",
        ),
        "kv_write": ("write:kv_write", "in place"),
        "rope_kv_write": (
            "write:rope_kv_write",
            "rotation of queries and keys, and the write, in one",
        ),
        "sample": ("sample:sample", "top-k, top-p, min-p and the draw in one, by bisection"),
    }
    for op, (target, summary) in targets.items():
        knows_cache = op.endswith("kv_write")  # such ops run under shard_map, like attention
        more: dict[str, Any] = {"layouts": ("nhd", "hnd")} if knows_cache else {"sharded": False}
        more |= {"quantizations": ("int8",)} if op == "grouped_linear" else {}
        register(
            "triton",
            f"enginebay_triton.{target}",
            op=op,
            platforms=("cuda",),
            requires=REQUIRES,
            extra="gpu",
            summary=summary,
            capabilities=CAPABILITIES | more,
        )


@hookimpl
def register_layouts(register: Register) -> None:
    """That of GPU kernels."""
    summary = "tokens, heads, key and value: GPU kernels"
    register("nhd", "enginebay_triton.layout:NhdLayout", summary=summary)
