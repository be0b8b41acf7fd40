"""The figures of each TPU generation that block sizes depend on."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from enginebay.errors import UnsupportedError

LANES = 128
"""Lanes of a vector register."""

MIB = 1 << 20

VMEM_RESERVE = 8 * MIB
"""Bytes of VMEM left to the compiler, for its scratch memory and for results that XLA keeps in VMEM
between calls.
"""


@dataclasses.dataclass(frozen=True)
class TpuGeneration:
    """One generation; figures are per core. `kinds` are JAX's names of its devices."""

    name: str
    kinds: tuple[str, ...]
    vmem_bytes: int
    smem_bytes: int
    mxu_columns: int
    hbm_bytes_per_s: float

    @property
    def vmem_limit_bytes(self) -> int:
        """The VMEM, in bytes, that a kernel of this package requests at most."""
        return self.vmem_bytes - VMEM_RESERVE


GENERATIONS = (
    TpuGeneration("v4", ("TPU v4",), 16 * MIB, MIB, 128, 1.23e12),
    TpuGeneration("v5e", ("TPU v5 lite", "TPU v5e"), 128 * MIB, MIB, 128, 8.2e11),
    TpuGeneration("v5p", ("TPU v5", "TPU v5p"), 64 * MIB, MIB, 128, 2.46e12),
    TpuGeneration("v6e", ("TPU v6 lite", "TPU v6e"), 128 * MIB, MIB, 256, 1.64e12),
    TpuGeneration("7x", ("TPU7x", "TPU7"), 64 * MIB, MIB, 256, 3.7e12),
)
"""Published figures, as jax.experimental.pallas.tpu.get_tpu_info has them."""

SMALLEST = TpuGeneration("any", (), 16 * MIB, MIB, 128, 8.2e11)
"""The smallest figures of all generations, used where the target is unknown, as in the interpreter.
"""


def generation(arch: str) -> TpuGeneration:
    """Return the generation that `Env.arch` or a device kind names; the smallest figures for "".

    Raises UnsupportedError for an unknown name, because guessed figures would become errors of the
    compiler.
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
    """Return the rows of a tile: 8 for dtypes of 32 bits, 16 for 16 bits, 32 for 8 bits."""
    return 8 * packing(dtype)


def packing(dtype: str) -> int:
    """Return how many values of a dtype share a 32-bit word."""
    return 4 // jnp.dtype(dtype).itemsize


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple that is at least `number`."""
    return -(-number // multiple) * multiple


def multiplies_int8() -> bool:
    """Return whether the TPU that a program is traced for multiplies int8; False for no TPU.

    A v4 does not.
    """
    try:
        return pltpu.get_tpu_info().int8_ops_per_second > 0
    except ValueError:  # the device is no TPU
        return False
