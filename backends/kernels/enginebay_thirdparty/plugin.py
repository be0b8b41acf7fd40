"""Registers kernels that come with JAX. `auto` takes none of them: name one to use it."""

from __future__ import annotations

from enginebay.plugins.hooks import Register, hookimpl

LAST = -20
"""The rank of all these kernels, below that of every other."""

COMPILER = "enginebay_pallas.compiler:compiler"


@hookimpl
def register_kernels(register: Register) -> None:
    """Register attention by `jax.nn`, and two Pallas kernels of JAX for TPUs."""
    register(
        "jax_nn",
        "enginebay_thirdparty.jax_nn:attention",
        op="attention",
        summary="jax.nn.dot_product_attention over each row's pages",
        capabilities={"priority": LAST},
    )
    register(
        "jax_ragged_paged",
        "enginebay_thirdparty.ragged_paged:attention",
        op="attention",
        platforms=("tpu",),
        summary="ragged paged attention of jax.experimental.pallas.ops.tpu",
        capabilities={"priority": LAST, "compiler": COMPILER},
    )
    register(
        "jax_megablox",
        "enginebay_thirdparty.megablox:grouped_linear",
        op="grouped_linear",
        platforms=("tpu",),
        summary="grouped product (gmm) of jax.experimental.pallas.ops.tpu.megablox",
        capabilities={"priority": LAST, "compiler": COMPILER, "sharded": False},
    )
