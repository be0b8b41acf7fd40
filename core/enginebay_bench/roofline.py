"""The measured limits of this machine: bytes read per second, floating-point operations per second,
and the time of a launch.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from enginebay_bench.cost import Cost

REPEATS = 5
STREAM_BYTES = 256 << 20
MATRIX = 2048
LAUNCHES = 50


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The best of a few measurements on one device; kernels are compared with it."""

    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    launch_s: float
    """Seconds between two calls of a compiled program that does nothing."""

    def ideal_s(self, cost: Cost, dtype: str) -> float:
        """Return the seconds of a cost at these rates, if arithmetic and memory traffic overlap
        fully.
        """
        return cost.time_s(flops_per_s=self.flops_per_s[dtype], bytes_per_s=self.bytes_per_s)

    def better(self, other: Roofline) -> Roofline:
        """Return the best values of two measurements."""
        return Roofline(
            max(self.bytes_per_s, other.bytes_per_s),
            {
                dtype: max(rate, other.flops_per_s[dtype])
                for dtype, rate in self.flops_per_s.items()
            },
            min(self.launch_s, other.launch_s),
        )

    def bound(self, cost: Cost, dtype: str, measured_s: float) -> str:
        """Return what limits an op of this cost: "launch", "memory" or "arithmetic"."""
        if measured_s < 2 * self.launch_s:
            return "launch"
        arithmetic = cost.flops / self.flops_per_s[dtype]
        return "arithmetic" if arithmetic > self.ideal_s(cost, dtype) * 0.999 else "memory"


def measure_roofline(
    device: jax.Device,
    dtypes: Iterable[str],
    options: Mapping[str, Any],
    *,
    stream_bytes: int | None = None,
    matrix: int | None = None,
) -> Roofline:
    """Measure the read rate of sums over a large array, products of square matrices by dtype, and
    launches of a small program.

    `stream_bytes` and `matrix` are the sizes of the array and the matrices (default: STREAM_BYTES
    and MATRIX).

    Takes a second or two. The result is not stored, because the rates of a shared machine change
    within minutes. So reports use the better of one measurement before and one after their own.
    """
    with jax.default_device(device):
        bytes_per_s = measure_reads(device, options, stream_bytes)
        flops = {dtype: _product_rate(dtype, matrix or MATRIX, options) for dtype in dtypes}
        return Roofline(bytes_per_s, flops, _launch_s(options))


def measure_reads(
    device: jax.Device, options: Mapping[str, Any], stream_bytes: int | None = None
) -> float:
    """Measure the bytes per second that sums over a large array read. Takes less than a second."""
    with jax.default_device(device):
        rows = max(1, (stream_bytes or STREAM_BYTES) // (4 * 16384))
        array = jnp.ones((rows, 16384), jnp.float32)
        vector = jnp.ones((16384,), jnp.float32)
        reads: tuple[Callable[[jax.Array], jax.Array], ...] = (
            lambda a: a.sum(axis=1),
            lambda a: a @ vector,
        )
        seconds = [_best(jax.jit(read, compiler_options=dict(options)), array) for read in reads]
        return rows * 16384 * 4 / min(seconds)


def _product_rate(dtype: str, size: int, options: Mapping[str, Any]) -> float:
    x = jnp.ones((size, size), dtype)
    highest = jax.lax.Precision.HIGHEST if dtype == "float32" else None

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(a, b, precision=highest, preferred_element_type=jnp.float32)

    return 2.0 * size**3 / _best(jax.jit(product, compiler_options=dict(options)), x, x)


def _launch_s(options: Mapping[str, Any]) -> float:
    step = jax.jit(lambda x: x + 1, donate_argnums=0, compiler_options=dict(options))

    def launches(x: jax.Array) -> jax.Array:
        for _ in range(LAUNCHES):
            x = step(x)
        return x

    return min(_timed(launches, step(jnp.zeros(8))) for _ in range(REPEATS)) / LAUNCHES


def _best(run: Callable[..., Any], *arguments: Any) -> float:
    jax.block_until_ready(run(*arguments))  # compile, and touch the memory
    return min(_timed(run, *arguments) for _ in range(REPEATS))


def _timed(run: Callable[..., Any], *arguments: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(*arguments))
    return time.perf_counter() - start
