"""Registers the kernels "native" for CPUs: linear, grouped_linear, lora, and attention."""

from __future__ import annotations

from enginebay.hooks import Register, hookimpl

CUSTOM_CALLS = {
    "linear": ("enginebay_linear", "enginebay_quantized_linear", "enginebay_panel_linear")
}
QUANTIZATIONS = {
    "linear": ("int8", "int8_group", "int4", "uint4", "fp8"),
    "grouped_linear": ("int8",),
}


@hookimpl
def register_kernels(register: Register) -> None:
    """Register linear, grouped_linear, lora and attention."""
    for op, summary in (
        ("linear", "products of few rows in C++, compiled for this processor"),
        ("grouped_linear", "reads each group's weight once, in C++"),
        ("lora", "reads only the adapters that tokens have, in C++"),
        (
            "attention",
            "decode steps in C++, compiled for this processor; reads each row up to its length",
        ),
    ):
        register(
            "native",
            f"enginebay_native.{op}:{op}",
            op=op,
            platforms=("cpu",),
            summary=summary,
            capabilities={
                "priority": 10,
                "sharded": op == "attention",
                "custom_calls": CUSTOM_CALLS.get(op, (f"enginebay_{op}",)),
                "quantizations": QUANTIZATIONS.get(op, ()),
                "activation_quantizations": ("int8",) if op == "linear" else (),
            },
        )
