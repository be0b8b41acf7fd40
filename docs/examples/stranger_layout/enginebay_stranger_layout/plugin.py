"""What this plugin offers: a cache layout, and the kernels that read and write it."""

from __future__ import annotations

from enginebay.hooks import Register, hookimpl

LAYOUT = "int8_heads"


@hookimpl
def register_layouts(register: Register) -> None:
    """Declare the layout. An engine takes it when it is chosen by name."""
    register(
        LAYOUT,
        "enginebay_stranger_layout.layout:Int8HeadsLayout",
        summary="int8 keys and values, a scale for each head of a token",
    )


@hookimpl
def register_kernels(register: Register) -> None:
    """Declare the kernels. The attention kernel says itself which layouts it reads."""
    register(
        "int8_scan",
        "enginebay_stranger_layout.attention:int8_scan",
        op="attention",
        platforms=("cpu",),
        summary="a scan over chunks of int8 keys, whose scales are applied to scores and weights",
    )
    register(
        "int8_heads",
        "enginebay_stranger_layout.kv_write:kv_write",
        op="kv_write",
        platforms=("cpu",),
        summary="keys and values rounded together",
        capabilities={"layouts": (LAYOUT,), "priority": 1},
    )
