"""Declarations of this plugin's parts: a cache layout, and the kernels that read and write it."""

from __future__ import annotations

from enginebay.plugins.hooks import Register, hookimpl

LAYOUT = "int8_heads"


@hookimpl
def register_layouts(register: Register) -> None:
    """Declare the layout. An engine uses it only when it is chosen by name."""
    register(
        LAYOUT,
        "enginebay_third_party_layout.layout:Int8HeadsLayout",
        summary="int8 keys and values with a scale for each head of a token",
    )


@hookimpl
def register_kernels(register: Register) -> None:
    """Declare the kernels. The capabilities of the attention kernel name the layouts it reads."""
    register(
        "int8_scan",
        "enginebay_third_party_layout.attention:int8_scan",
        op="attention",
        platforms=("cpu",),
        summary="a scan over chunks of int8 keys; scales multiply scores and weights",
    )
    register(
        "int8_heads",
        "enginebay_third_party_layout.kv_write:kv_write",
        op="kv_write",
        platforms=("cpu",),
        summary="rounds keys and values in one pass",
        capabilities={"layouts": (LAYOUT,), "priority": 1},
    )
