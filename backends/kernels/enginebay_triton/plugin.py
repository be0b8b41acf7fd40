"""Registers the Triton kernels for NVIDIA GPUs, their cache layout, and cuDNN's prefill."""

from __future__ import annotations

from typing import Any

from enginebay.plugins.hooks import Register, hookimpl

REQUIRES = ("triton", "jax_triton")
CAPABILITIES: dict[str, Any] = {
    "priority": 10,
    "compiler": "enginebay_triton.compiler:compiler",
    "custom_calls": ("triton_kernel_call", "triton_kernel_call_ffi"),
}

QUANTIZED: dict[str, Any] = {
    "quantizations": ("int8", "int8_group", "int4", "uint4", "fp8"),
    "activation_quantizations": ("int8",),
}
"""Forms of weights and of rounded inputs that the kernels of products read."""

CACHES: dict[str, Any] = {"layouts": ("nhd", "hnd"), "storages": ("int8", "uint4", "fp8")}
"""Caches that the kernels of kv_write and rope_kv_write write."""


@hookimpl
def register_kernels(register: Register) -> None:
    """Register attention, prefills without a prefix, and the ops around attention."""
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
        summary="prefill without a prefix, from the new keys and values",
        capabilities=CAPABILITIES,
    )
    register(
        "cudnn",
        "enginebay_triton.cudnn:cudnn",
        op="attention",
        platforms=("cuda",),
        extra="gpu",
        summary="prefill without a prefix by cuDNN's fused kernel, through jax.nn",
    )
    _register_plain(register)


def _register_plain(register: Register) -> None:
    targets = {
        "rms_norm": ("norm:rms_norm", "reads and writes each row once"),
        "add_rms_norm": ("norm:add_rms_norm", "a residual sum and its norm in one kernel"),
        "linear": (
            "linear:linear",
            "widens quantised weights in registers; plain weights by XLA",
        ),
        "grouped_linear": (
            "grouped_linear:grouped_linear",
            "blocks of rows of one group; reads that group's weight only",
        ),
        "lora": ("lora:lora", "in place; reads the adapters that tokens have"),
        "kv_write": ("write:kv_write", "in place"),
        "rope_kv_write": (
            "write:rope_kv_write",
            "rotation of queries and keys, and the cache write, in one kernel",
        ),
        "sample": ("sample:sample", "top-k, top-p, min-p and the draw in one kernel, by bisection"),
    }
    for op, (target, summary) in targets.items():
        knows_cache = op.endswith("kv_write")  # these ops run under shard_map, as attention does
        more: dict[str, Any] = CACHES if knows_cache else {"sharded": False}
        more = more | QUANTIZED if op.endswith("linear") else more
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
    """Register the cache layout of GPU kernels."""
    summary = "tokens, heads, then key and value; for GPU kernels"
    register("nhd", "enginebay_triton.layout:NhdLayout", summary=summary)
