"""What this plugin offers. Nothing is imported here but the hooks: targets are imported when they
are picked.
"""

from __future__ import annotations

from enginebay.hooks import Register, hookimpl

EVERYWHERE = ("cpu", "cuda", "tpu")
COMPILED = {"compiler": "enginebay_swiglu.compiler:compiler"}


@hookimpl
def register_ops(register: Register) -> None:
    """The record that says what swiglu is."""
    register("swiglu", "enginebay_swiglu.op:SWIGLU", summary="silu(x gate) * (x up)")


@hookimpl
def register_kernels(register: Register) -> None:
    """The reference, and a kernel with a block size that can be tuned."""
    register(
        "plain",
        "enginebay_swiglu.plain:swiglu",
        op="swiglu",
        platforms=EVERYWHERE,
        capabilities=COMPILED,
        summary="two products and their activation",
    )
    register(
        "blocks",
        "enginebay_swiglu.blocks:swiglu",
        op="swiglu",
        platforms=EVERYWHERE,
        capabilities={**COMPILED, "priority": 10},
        summary="a block of columns at a time, both products and the activation in one",
    )


@hookimpl
def register_models(register: Register) -> None:
    """Llama's decoder with the op in its MLP."""
    register(
        "swiglu_llama",
        "enginebay_swiglu.model:family",
        capabilities={"architectures": ("SwigluLlamaForCausalLM",)},
        summary="Llama with the op swiglu",
    )
