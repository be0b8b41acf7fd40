"""What this package offers: the kernels "native" of linear, grouped_linear and attention's decode
steps, on the CPU.
"""

from __future__ import annotations

from enginebay.hooks import Register, hookimpl


@hookimpl
def register_kernels(register: Register) -> None:
    """linear, grouped_linear and attention."""
    for op, summary in (
        ("linear", "products of few rows in C++, for the processor at hand"),
        ("grouped_linear", "each group's weight is read once, in C++"),
        ("attention", "decode steps over each row's own length in C++, for the processor at hand"),
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
                "custom_calls": (f"enginebay_{op}",),
                "quantizations": () if op == "attention" else ("int8",),
            },
        )
