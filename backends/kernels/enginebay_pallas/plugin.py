"""Registers the Pallas kernels for TPUs and their cache layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.plugins.hooks import Register, hookimpl

COMPILER: Mapping[str, Any] = {"compiler": "enginebay_pallas.compiler:compiler"}
QUANTIZED: Mapping[str, Any] = {
    "quantizations": ("int8", "int8_group", "int4", "uint4", "fp8"),
    "activation_quantizations": ("int8",),
}
"""Forms of weights and of rounded inputs that the kernels of products read."""


@hookimpl
def register_kernels(register: Register) -> None:
    """Register attention of every phase, flash attention of prompts, and five other ops."""
    attention = {
        "pallas": (
            "attention:attention",
            "ragged paged attention that writes the new tokens itself",
        ),
        "pallas_flash": (
            "flash:flash_attention",
            "flash attention of prompts without a prefix",
        ),
    }
    for name, (target, summary) in attention.items():
        register(
            name,
            f"enginebay_pallas.{target}",
            op="attention",
            platforms=("tpu",),
            extra="tpu",
            summary=summary,
            capabilities=COMPILER,
        )
    # XLA fuses a norm with its neighbours, and cannot fuse a kernel. So `auto` never takes this
    # one.
    norm = {"sharded": False, "priority": -10}
    ops: dict[str, tuple[dict[str, Any], str]] = {
        "kv_write": (
            {"layouts": ("tpu_rpa",), "priority": 10, "storages": ("int8", "uint4", "fp8")},
            "copies new tokens to their slots by DMA",
        ),
        "rms_norm": (norm, "computes a block of rows at a time"),
        "linear": (
            {"sharded": False, "priority": 10, **QUANTIZED},
            "widens quantised weights in VMEM; plain weights by XLA",
        ),
        "grouped_linear": (
            {"sharded": False, "priority": 10, **QUANTIZED},
            "blocks of rows of one group; reads each weight once",
        ),
        "lora": (
            {"sharded": False, "priority": 10},
            "blocks of tokens of one adapter; reads the adapters that tokens have",
        ),
        "sample": (
            {"sharded": False, "priority": 10},
            "finds the borders of top-k and top-p by bisection in VMEM",
        ),
    }
    for op, (facts, summary) in ops.items():
        target = f"enginebay_pallas.{op}:{op}"
        capabilities = {**COMPILER, **facts}
        register(
            "pallas",
            target,
            op=op,
            platforms=("tpu",),
            extra="tpu",
            summary=summary,
            capabilities=capabilities,
        )


@hookimpl
def register_layouts(register: Register) -> None:
    """Register the cache layout of TPU kernels."""
    summary = "packed and padded to TPU tiles"
    register("tpu_rpa", "enginebay_pallas.layout:TpuRpaLayout", summary=summary)
