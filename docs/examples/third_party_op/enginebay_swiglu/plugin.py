"""Declarations of this plugin's parts. This module imports only the hooks; enginebay imports a part
when the part is chosen.
"""

from __future__ import annotations

from enginebay.plugins.hooks import Register, hookimpl

COMPILED = {"compiler": "enginebay_swiglu.compiler:compiler"}


@hookimpl
def register_ops(register: Register) -> None:
    """Declare the op by its record."""
    register("swiglu", "enginebay_swiglu.op:SWIGLU", summary="silu(x gate) * (x up)")


@hookimpl
def register_kernels(register: Register) -> None:
    """Declare the reference, and a kernel with a block size that can be tuned."""
    register(
        "plain",
        "enginebay_swiglu.plain:swiglu",
        op="swiglu",
        capabilities=COMPILED,
        summary="two products and their activation",
    )
    register(
        "blocks",
        "enginebay_swiglu.blocks:swiglu",
        op="swiglu",
        capabilities={**COMPILED, "priority": 10},
        summary="one block of columns at a time, with both products and the activation",
    )


@hookimpl
def register_models(register: Register) -> None:
    """Declare Llama's decoder with the op in its MLP."""
    register(
        "swiglu_llama",
        "enginebay_swiglu.model:family",
        capabilities={"architectures": ("SwigluLlamaForCausalLM",)},
        summary="Llama with the op swiglu",
    )
