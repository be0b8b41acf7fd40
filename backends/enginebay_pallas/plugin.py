"""What this package offers: kernels for TPUs, written in Pallas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.hooks import Register, hookimpl

COMPILER: Mapping[str, Any] = {"compiler": "enginebay_pallas.compiler:compiler"}


@hookimpl
def register_kernels(register: Register) -> None:
    """Attention of every phase, flash attention of prompts, and the ops kv_write, rms_norm,
    grouped_linear and sample.
    """
    attention = {
        "pallas": (
            "attention:attention",
            "ragged paged attention that writes the new tokens itself",
        ),
        "pallas_flash": (
            "flash:flash_attention",
            "prompts without a prefix, whose keys are all fresh",
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
    # XLA fuses a norm into its neighbours, which a kernel cannot be: this one is for who wants it.
    norm = {"sharded": False, "priority": -10}
    ops: dict[str, tuple[dict[str, Any], str]] = {
        "kv_write": ({"layouts": ("tpu_rpa",), "priority": 10}, "new tokens to their slots by DMA"),
        "rms_norm": (norm, "a block of rows at a time"),
        "grouped_linear": (
            {"sharded": False, "priority": 10, "quantizations": ("int8",)},
            "blocks of one group's rows, each group's weight fetched once",
        ),
        "sample": ({"sharded": False, "priority": 10}, "borders by bisection in VMEM"),
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
    """That of TPU kernels."""
    summary = "packed and padded to TPU tiles"
    register("tpu_rpa", "enginebay_pallas.layout:TpuRpaLayout", summary=summary)
