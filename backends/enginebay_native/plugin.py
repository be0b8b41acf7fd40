"""What this package offers: the kernels "native" of linear and of attention's decode steps, on the
CPU.
"""

from __future__ import annotations

from enginebay.hooks import Register, hookimpl


@hookimpl
def register_kernels(register: Register) -> None:
    """linear and attention."""
    for op, summary in (
        ("linear", "products of few rows in C++, for the processor at hand"),
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
                "quantizations": ("int8",) if op == "linear" else (),
            },
        )
