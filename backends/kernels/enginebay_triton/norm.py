"""The ops rms_norm and add_rms_norm in Triton: each row is read once and written once."""

from __future__ import annotations

import dataclasses
import math

import jax

from enginebay_triton.call import Launch, Launcher, launch, require_versions
from enginebay_triton.interpreter import interpret, require

require_versions()

from enginebay_triton.norm_kernels import add_rms_norm_kernel, rms_norm_kernel  # noqa: E402  # needs Triton

TILE = 1024
"""Values per program when rows are narrow; a program then takes several rows."""

VALUES_PER_WARP = 512
"""Values per thread: in bf16 two loads of sixteen bytes each."""


def tile_of(num_features: int) -> tuple[int, int, int]:
    """Return (rows per program, width of a row rounded up to a power of two, warps)."""
    width = _next_power_of_two(num_features)
    rows = max(1, TILE // width)
    return rows, width, min(16, max(1, rows * width // VALUES_PER_WARP))


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _launch_of(x: jax.Array, eps: float, num_out: int) -> Launch:
    size = x.shape[-1]
    num_rows = math.prod(x.shape[:-1])
    rows, width, warps = tile_of(size)
    made = jax.ShapeDtypeStruct((num_rows, size), x.dtype)
    constants = {"NUM_ROWS": num_rows, "SIZE": size, "EPS": eps, "ROWS": rows, "BLOCK": width}
    return Launch(
        (-(-num_rows // rows),), (made,) * num_out, constants, num_warps=warps, num_stages=1
    )


@dataclasses.dataclass(frozen=True)
class TritonRmsNorm:
    """The op rms_norm; RmsNormOp describes it. It rounds at the same places as enginebay_xla."""

    launcher: Launcher = launch

    def __call__(self, x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
        """Return x [..., features] / rms(x) * weight [features] in x's dtype."""
        flat = x.reshape(-1, x.shape[-1])
        (out,) = self.launcher(rms_norm_kernel, [flat, weight], _launch_of(x, eps, 1))
        return out.reshape(x.shape)

    def interpreted(self) -> TritonRmsNorm:
        """Return the same op in Triton's interpreter; raises UnsupportedError without Triton."""
        require()
        return dataclasses.replace(self, launcher=interpret)


@dataclasses.dataclass(frozen=True)
class AddRmsNorm:
    """The op add_rms_norm; AddRmsNormOp describes it."""

    launcher: Launcher = launch

    def __call__(
        self, x: jax.Array, residual: jax.Array, weight: jax.Array, *, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        """Return (rms_norm(x + residual), x + residual), both [..., features] in x's dtype."""
        flat = [array.reshape(-1, x.shape[-1]) for array in (x, residual)]
        normed, total = self.launcher(add_rms_norm_kernel, [*flat, weight], _launch_of(x, eps, 2))
        return normed.reshape(x.shape), total.reshape(x.shape)

    def interpreted(self) -> AddRmsNorm:
        """Return the same op in Triton's interpreter; raises UnsupportedError without Triton."""
        require()
        return dataclasses.replace(self, launcher=interpret)


rms_norm = TritonRmsNorm()
add_rms_norm = AddRmsNorm()
