"""The ops rms_norm and add_rms_norm in plain JAX: many ways to sum squares, and to apply them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

StatisticsWay = Callable[[jax.Array, float], jax.Array]
"""x f32 [..., features], eps -> 1 / sqrt(mean of squares + eps) [..., 1]."""


def two_passes(x: jax.Array, eps: float) -> jax.Array:
    """The mean of squares as the variance plus the square of the mean."""
    mean = x.mean(axis=-1, keepdims=True)
    variance = jnp.square(x - mean).mean(axis=-1, keepdims=True)
    return 1 / jnp.sqrt(variance + jnp.square(mean) + eps)


def parts(x: jax.Array, eps: float, *, count: int) -> jax.Array:
    """So many parts of the features, each with a sum of its own."""
    size = -(-x.shape[-1] // count)
    sums = [
        jnp.square(x[..., start : start + size]).sum(axis=-1, keepdims=True)
        for start in range(0, x.shape[-1], size)
    ]
    return jax.lax.rsqrt(functools.reduce(jnp.add, sums) / x.shape[-1] + eps)


def halves(x: jax.Array, eps: float) -> jax.Array:
    """The right half is added to the left one until one number is left."""
    squares = jnp.square(x)
    while squares.shape[-1] > 1:
        size = squares.shape[-1]
        squares = jnp.pad(squares, [(0, 0)] * (x.ndim - 1) + [(0, size % 2)])
        half = squares.shape[-1] // 2
        squares = squares[..., :half] + squares[..., half:]
    return jax.lax.rsqrt(squares / x.shape[-1] + eps)


def welford(x: jax.Array, eps: float) -> jax.Array:
    """A running mean of the squares, one feature after the other."""

    def add(i: jax.Array, mean: jax.Array) -> jax.Array:
        return mean + (jnp.square(x[..., i]) - mean) / (i + 1)

    mean = jax.lax.fori_loop(0, x.shape[-1], add, jnp.zeros(x.shape[:-1], jnp.float32))
    return jax.lax.rsqrt(mean[..., None] + eps)


def by_the_largest(x: jax.Array, eps: float) -> jax.Array:
    """Squares of numbers that are divided by a power of two near the largest of their row."""
    largest = jnp.abs(x).max(axis=-1, keepdims=True)
    power = jnp.exp2(jnp.floor(jnp.log2(jnp.where(largest > 0, largest, 1))))
    power = jnp.clip(power, 2.0**-60, 2.0**60)
    mean = jnp.square(x / power).mean(axis=-1, keepdims=True)
    return 1 / (power * jnp.sqrt(mean + eps / power / power))


def compensated(x: jax.Array, eps: float) -> jax.Array:
    """One feature after the other, with what the sum before has lost."""

    def add(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, lost = state
        new = jnp.square(x[..., i]) - lost
        higher = total + new
        return higher, (higher - total) - new

    zeros = jnp.zeros(x.shape[:-1], jnp.float32)
    total, _ = jax.lax.fori_loop(0, x.shape[-1], add, (zeros, zeros))
    return jax.lax.rsqrt(total[..., None] / x.shape[-1] + eps)


def as_product(x: jax.Array, eps: float) -> jax.Array:
    """Each row times itself, as a product of matrices."""
    highest = jax.lax.Precision.HIGHEST
    total = jnp.einsum("...i,...i->...", x, x, precision=highest)
    return jax.lax.rsqrt(total[..., None] / x.shape[-1] + eps)


def backwards(x: jax.Array, eps: float) -> jax.Array:
    """Blocks of 32 features from the last one, with zeros where the last block ends early."""
    missing = -x.shape[-1] % 32
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(missing, 0)])
    blocks = padded.reshape(*x.shape[:-1], -1, 32)[..., ::-1, ::-1]
    total = jnp.zeros(x.shape[:-1], jnp.float32)
    for block in range(blocks.shape[-2]):
        total = total + jnp.square(blocks[..., block, :]).sum(axis=-1)
    return jnp.power(total[..., None] / x.shape[-1] + eps, -0.5)


def on_host(x: jax.Array, eps: float) -> jax.Array:
    """NumPy's sum of f32."""

    def statistics(x: np.ndarray) -> np.ndarray:
        squares = np.square(np.asarray(x))
        mean = squares.mean(axis=-1, keepdims=True, dtype=np.float32)
        return (1 / np.sqrt(mean + np.float32(eps))).astype(np.float32)

    shape = jax.ShapeDtypeStruct((*x.shape[:-1], 1), jnp.float32)
    found: jax.Array = jax.pure_callback(statistics, shape, x)
    return found


Rounding = Literal["twice", "once"]


@dataclasses.dataclass(frozen=True)
class RmsNorm:
    """See the module. `rounding`: before and after the product with the weight, or after it alone.
    `rows`: rows are computed one after the other.
    """

    statistics: StatisticsWay
    rounding: Rounding = "once"
    rows: bool = False

    def __call__(self, x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
        if self.rows:
            flat = x.reshape(-1, x.shape[-1])
            found = jax.lax.map(lambda row: self.normed(row, weight, eps), flat)
            return found.reshape(x.shape)
        return self.normed(x, weight, eps)

    def normed(self, x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
        """The op on any number of rows."""
        wide = x.astype(jnp.float32)
        normed = wide * self.statistics(wide, eps)
        if self.rounding == "twice":
            normed = normed.astype(x.dtype).astype(jnp.float32)
        return (normed * weight.astype(jnp.float32)).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class AddRmsNorm:
    """A sum, rounded, and a norm of it. `wide`: the sum is computed in f32, and rounded by its
    bits.
    """

    norm: RmsNorm
    wide: bool = False

    def __call__(
        self, x: jax.Array, residual: jax.Array, weight: jax.Array, *, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        if self.wide:
            total = (x.astype(jnp.float32) + residual.astype(jnp.float32)).astype(x.dtype)
        else:
            total = residual + x
        # Without the barrier a compiler may take the sum for the norm before it is rounded.
        total = jax.lax.optimization_barrier(total)
        return self.norm(total, weight, eps=eps), total


passes = RmsNorm(two_passes)
eighths = RmsNorm(functools.partial(parts, count=8), "twice")
in_halves = RmsNorm(halves)
running = RmsNorm(welford)
scaled = RmsNorm(by_the_largest, "twice")
exact = RmsNorm(compensated)
product = RmsNorm(as_product, rows=True)
last_first = RmsNorm(backwards, "twice", rows=True)
host = RmsNorm(on_host)

add_passes = AddRmsNorm(passes, wide=True)
add_eighths = AddRmsNorm(eighths)
add_in_halves = AddRmsNorm(in_halves)
add_running = AddRmsNorm(running, wide=True)
add_scaled = AddRmsNorm(scaled)
add_exact = AddRmsNorm(exact)
add_product = AddRmsNorm(product, wide=True)
add_last_first = AddRmsNorm(last_first)
add_host = AddRmsNorm(host)
