"""Registers the kernels "native" for CPUs: linear, grouped_linear, lora, and attention."""

from __future__ import annotations

from enginebay.plugins.hooks import Register, hookimpl

PRODUCTS = ("linear", "grouped_linear")
"""Ops that read quantised weights."""

FORMS = {
    "attention": ("attention_f32", "attention_bf16", "attention_codes"),
    "linear": ("linear_f32", "linear_bf16", "linear_s8", "linear_f8"),
}
"""The libraries of an op that has several, without those for quantised weights."""

QUANTIZED = (
    *(
        f"{n}_linear_{form}"
        for n in ("quantized", "rounded", "group_rounded")
        for form in ("s8", "zeros_s8", "s4", "u4")
    ),
    "panel_linear",
)
"""The libraries for quantised weights."""

QUANTIZATIONS = ("int8", "int8_group", "int4", "uint4", "fp8")
ROUNDINGS = ("int8", "int8_group")


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
                "custom_calls": tuple(
                    f"enginebay_{name}"
                    for name in (*FORMS.get(op, (op,)), *(QUANTIZED if op in PRODUCTS else ()))
                ),
                "register_call": "enginebay_native.calls:register_call",
                "quantizations": QUANTIZATIONS if op in PRODUCTS else (),
                "activation_quantizations": ROUNDINGS if op in PRODUCTS else (),
            },
        )
