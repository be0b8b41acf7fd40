"""What distinguishes one generation of TPU from another, as far as block sizes depend on it."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from enginebay.errors import UnsupportedError

LANES = 128
"""Values in a row of a vector register, whatever their width."""

MIB = 1 << 20

VMEM_RESERVE = 8 * MIB
"""VMEM that is left to the compiler: its own scratch, and results of XLA's that stay there between
calls.
"""


@dataclasses.dataclass(frozen=True)
class Generation:
    """One generation, per core. `kinds` are the names that JAX gives its devices."""

    name: str
    kinds: tuple[str, ...]
    vmem_bytes: int
    smem_bytes: int
    mxu_columns: int
    hbm_bytes_per_s: float

    @property
    def vmem_limit_bytes(self) -> int:
        """The most that a kernel of ours asks for."""
        return self.vmem_bytes - VMEM_RESERVE


GENERATIONS = (
    Generation("v4", ("TPU v4",), 16 * MIB, MIB, 128, 1.23e12),
    Generation("v5e", ("TPU v5 lite", "TPU v5e"), 128 * MIB, MIB, 128, 8.2e11),
    Generation("v5p", ("TPU v5", "TPU v5p"), 64 * MIB, MIB, 128, 2.46e12),
    Generation("v6e", ("TPU v6 lite", "TPU v6e"), 128 * MIB, MIB, 256, 1.64e12),
    Generation("7x", ("TPU7x", "TPU7"), 64 * MIB, MIB, 256, 3.7e12),
)
"""Published figures, as jax.experimental.pallas.tpu.get_tpu_info has them."""

SMALLEST = Generation("any", (), 16 * MIB, MIB, 128, 8.2e11)
"""What fits every generation: used where the target is not known, as when a kernel is interpreted.
"""


def generation(arch: str) -> Generation:
    """The generation that `Env.arch` or a device kind names; the smallest budget for "".

    UnsupportedError for a name that is none of them: a budget that was guessed would be a
    compiler's error later.
    """
    if not arch:
        return SMALLEST
    for each in GENERATIONS:
        if arch == each.name or arch in each.kinds:
            return each
    known = ", ".join(each.name for each in GENERATIONS)
    raise UnsupportedError(
        f"TPU architecture {arch!r}", known, "Choose the kernels xla, or add its figures."
    )


def sublanes(dtype: str) -> int:
    """Rows of a tile of a dtype: 8 of 32 bits, 16 of 16, 32 of 8."""
    return 8 * packing(dtype)


def packing(dtype: str) -> int:
    """Values of a dtype that share a 32-bit word."""
    return 4 // jnp.dtype(dtype).itemsize


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is not below a number."""
    return -(-number // multiple) * multiple
