"""The op rope in plain JAX: many ways to find the cosine and sine of a position, and to rotate by
them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.ops.rotary import RopeSpec, rope_frequencies

Turn = tuple[jax.Array, jax.Array]
"""Cosine and sine of angles, f32 [T, pairs]."""

AnglesWay = Callable[[jax.Array, np.ndarray], Turn]
"""positions int32 [T], frequencies f32 [pairs] -> cosine and sine."""


def by_products(positions: jax.Array, frequencies: np.ndarray) -> Turn:
    """Of the product of position and frequency in f32."""
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def sum_of(one: Turn, other: Turn) -> Turn:
    """Cosine and sine of the sum of two angles."""
    (cos, sin), (more_cos, more_sin) = one, other
    return cos * more_cos - sin * more_sin, sin * more_cos + cos * more_sin


DIGIT = 2048


def by_tables(positions: jax.Array, frequencies: np.ndarray) -> Turn:
    """Of the three digits of a position to the base DIGIT, each from a table that was computed in
    f64.
    """
    turns: list[Turn] = []
    scale = 1
    for _ in range(3):
        angles = np.arange(DIGIT)[:, None] * scale * frequencies.astype(np.float64)
        digit = (positions // scale) % DIGIT
        cos, sin = (
            jnp.asarray(part.astype(np.float32)) for part in (np.cos(angles), np.sin(angles))
        )
        turns.append((cos[digit], sin[digit]))
        scale *= DIGIT
    return functools.reduce(sum_of, turns)


def by_sums(positions: jax.Array, frequencies: np.ndarray) -> Turn:
    """Of a multiple of 256, and of what is left of the position."""
    rest = positions % 256
    return sum_of(by_products(positions - rest, frequencies), by_products(rest, frequencies))


def by_doubling(positions: jax.Array, frequencies: np.ndarray) -> Turn:
    """Of each bit of the position, as a product of turns that were computed in f64."""
    found = (
        jnp.ones((positions.shape[0], len(frequencies)), jnp.float32),
        jnp.zeros((positions.shape[0], len(frequencies)), jnp.float32),
    )
    for bit in range(31):
        angles = 2.0**bit * frequencies.astype(np.float64)
        cos, sin = (
            jnp.asarray(part.astype(np.float32)) for part in (np.cos(angles), np.sin(angles))
        )
        is_set = ((positions >> bit) & 1)[:, None] == 1
        turned = sum_of(found, (cos, sin))
        found = (jnp.where(is_set, turned[0], found[0]), jnp.where(is_set, turned[1], found[1]))
    return found


def by_two_parts(positions: jax.Array, frequencies: np.ndarray) -> Turn:
    """Of the product, and of what the product in f32 has lost: frequencies of 12 bits, and the
    rest of them, times two digits of the position, are exact.
    """
    high = np.float32(frequencies)
    wide = (high.view(np.uint32) & np.uint32(0xFFFFF000)).view(np.float32)
    rest = positions % 2048
    parts = [
        digit.astype(jnp.float32)[:, None] * part
        for digit in (positions - rest, rest)
        for part in (wide, high - wide)
    ]
    turns = [(jnp.cos(angles), jnp.sin(angles)) for angles in parts]
    return functools.reduce(sum_of, turns)


def on_host(positions: jax.Array, frequencies: np.ndarray) -> Turn:
    """NumPy's, of a product in f64."""

    def turn(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        angles = np.asarray(positions).astype(np.float64)[:, None] * frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    shape = jax.ShapeDtypeStruct((positions.shape[0], len(frequencies)), jnp.float32)
    found: Turn = jax.pure_callback(turn, (shape, shape), positions)
    return found


def by_phases(positions: jax.Array, frequencies: np.ndarray) -> Turn:
    """Of a phase in units of 2**-32 turns, which whole numbers of 32 bits wrap by themselves."""
    rates = np.rint(frequencies.astype(np.float64) / (2 * math.pi) * 2.0**32)
    steps = jnp.asarray((rates % 2.0**32).astype(np.uint32))
    phases = jax.lax.bitcast_convert_type(positions.astype(jnp.uint32)[:, None] * steps, jnp.int32)
    angles = phases.astype(jnp.float32) * np.float32(2 * math.pi / 2.0**32)
    return jnp.cos(angles), jnp.sin(angles)


RotateWay = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""x f32 [T, heads, rotary_dim], cosine and sine [T, 1, pairs] -> rotated."""


def halves(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """The second half of the features first."""
    first, second = jnp.split(x, 2, axis=-1)
    high = first * sin + second * cos
    return jnp.concatenate([first * cos - second * sin, high], axis=-1)


def as_complex(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """A pair of features is a complex number."""
    turned = jax.lax.complex(*jnp.split(x, 2, axis=-1)) * jax.lax.complex(cos, sin)
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


def rolled(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """All features times cosines, and the features half a turn away times signed sines."""
    other = jnp.roll(x, x.shape[-1] // 2, axis=-1)
    return x * jnp.concatenate([cos, cos], -1) + other * jnp.concatenate([-sin, sin], -1)


def by_matrices(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """A pair of features times a matrix of two rows."""
    pairs = x.reshape(*x.shape[:-1], 2, -1)
    matrix = jnp.stack([jnp.stack([cos, -sin]), jnp.stack([sin, cos])])[:, :, :, 0]  # [2, 2, T, p]
    highest = jax.lax.Precision.HIGHEST
    return jnp.einsum("thjp,ijtp->thip", pairs, matrix, precision=highest).reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class Rope:
    """See the module. `each`: all at once, or one token or head after the other. `scale_last`: the
    factor of the rule for long contexts is applied to the result.
    """

    angles: AnglesWay = by_products
    rotate: RotateWay = halves
    each: Literal["all", "token", "head"] = "all"
    scale_last: bool = False

    def __call__(self, x: jax.Array, positions: jax.Array, *, spec: RopeSpec) -> jax.Array:
        if self.each == "token":
            one = functools.partial(self.turned, spec=spec)
            pairs = x[:, None], positions[:, None]
            return jax.lax.map(lambda pair: one(*pair)[0], pairs)
        if self.each == "head":
            heads = x.swapaxes(0, 1)
            one_head = functools.partial(self.turned, positions=positions, spec=spec)
            found = jax.lax.map(lambda head: one_head(head[:, None])[:, 0], heads)
            return found.swapaxes(0, 1)
        return self.turned(x, positions, spec=spec)

    def turned(self, x: jax.Array, positions: jax.Array, *, spec: RopeSpec) -> jax.Array:
        """The op for any number of tokens and heads."""
        frequencies, factor = rope_frequencies(spec)
        cos, sin = (part[:, None] for part in self.angles(positions, frequencies))
        if not self.scale_last:
            cos, sin = cos * factor, sin * factor
        new = self.rotate(x[..., : spec.rotary_dim].astype(jnp.float32), cos, sin)
        new = new * factor if self.scale_last else new
        return jnp.concatenate([new.astype(x.dtype), x[..., spec.rotary_dim :]], axis=-1)


complex_numbers = Rope(rotate=as_complex)
tables = Rope(by_tables)
added = Rope(by_sums, rolled)
doubled = Rope(by_doubling, scale_last=True)
two_parts = Rope(by_two_parts, as_complex)
phases = Rope(by_phases, by_matrices)
head_by_head = Rope(rotate=rolled, each="head")
token_by_token = Rope(rotate=by_matrices, each="token", scale_last=True)
host = Rope(on_host, rolled)
