"""The op sample in plain JAX: many ways to find the kept tokens, and to draw among them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.errors import UnsupportedError
from enginebay.ops.sampling import gumbel_noise


class Rows(NamedTuple):
    """The arguments of the op, those of a row as [S, 1], with exp(z)."""

    z: jax.Array
    mass: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array


KeepWay = Callable[[Rows], jax.Array]
"""Which tokens pass top_k and top_p, bool [S, vocab]."""


def total_of(values: jax.Array) -> jax.Array:
    """The sum of each row [S, 1], by blocks of 128, so that no sum has many terms."""
    missing = -values.shape[1] % 128
    blocks = jnp.pad(values, ((0, 0), (0, missing))).reshape(values.shape[0], -1, 128)
    return blocks.sum(axis=2).sum(axis=1, keepdims=True)


def in_top_k(rows: Rows) -> jax.Array:
    """Tokens with a z of at least the k-th largest, which is found in a sorted row."""
    ordered = jnp.sort(rows.z, axis=1)
    return rows.z >= jnp.take_along_axis(ordered, rows.z.shape[1] - rows.top_k, axis=1)


def by_sort(rows: Rows) -> jax.Array:
    """All tokens in the order of their mass, equal ones by id, and back."""
    inside = in_top_k(rows)
    mass = jnp.where(inside, rows.mass, 0)
    order = jnp.argsort(-mass, axis=1, stable=True)
    ordered = jnp.take_along_axis(mass, order, axis=1)
    before = jnp.cumsum(ordered, axis=1) - ordered
    within = before < rows.top_p * total_of(mass)
    back = jnp.argsort(order, axis=1)
    return inside & (jnp.take_along_axis(within, back, axis=1) | (rows.top_p >= 1))


def from_the_end(rows: Rows) -> jax.Array:
    """The least tokens first: what lies before a token is the total without the sum up to it."""
    vocab = rows.z.shape[1]
    inside = in_top_k(rows)
    mass = jnp.where(inside, rows.mass, 0)
    ids = jnp.broadcast_to(-jnp.arange(vocab), mass.shape)
    ordered, order = jax.lax.sort((mass, ids), dimension=1, num_keys=2)
    upto = jnp.cumsum(ordered, axis=1)
    before = upto[:, -1:] - upto
    within = before < rows.top_p * upto[:, -1:]
    found = jnp.zeros_like(inside)
    found = jax.vmap(lambda out, place, value: out.at[place].set(value))(found, -order, within)
    return inside & (found | (rows.top_p >= 1))


def by_bisection(rows: Rows) -> jax.Array:
    """Borders between 0 and the largest mass, halved until two neighbours are left."""
    inside = _at_least(rows, jnp.ones_like(rows.z, jnp.int32), rows.top_k, rows.z > -jnp.inf)
    inside = jnp.where(rows.top_k >= rows.z.shape[1], True, inside)
    mass = jnp.where(inside, rows.mass, 0)
    wanted = rows.top_p * total_of(mass)
    bits = jax.lax.bitcast_convert_type(mass, jnp.int32)

    def enough(border: jax.Array) -> jax.Array:
        return total_of(jnp.where(bits >= border, mass, 0)) >= wanted

    border = _largest_that(enough, jnp.zeros_like(rows.top_k), bits.max(axis=1, keepdims=True))
    above = total_of(jnp.where(bits > border, mass, 0))
    each = jax.lax.bitcast_convert_type(border, jnp.float32)
    is_border = bits == border
    earlier = (jnp.cumsum(is_border, axis=1) - 1).astype(jnp.float32)
    within = (bits > border) | (is_border & (above + earlier * each < wanted))
    return inside & (within | (rows.top_p >= 1))


def _at_least(rows: Rows, count: jax.Array, wanted: jax.Array, real: jax.Array) -> jax.Array:
    """Tokens with the z of the k-th largest or more; -inf is the least of all."""
    depth = jax.lax.bitcast_convert_type(jnp.where(real, -rows.z, jnp.inf), jnp.int32)
    depth = jnp.where(rows.z == 0, 0, depth)
    low = jnp.zeros_like(wanted)
    high = jnp.full_like(wanted, 0x7F800000)

    def reaches(limit: jax.Array) -> jax.Array:
        inside = jnp.where(depth <= -limit, count, 0)
        return inside.sum(axis=1, keepdims=True) >= wanted

    limit = -_largest_that(reaches, -high, low)
    return depth <= limit


def _largest_that(
    holds: Callable[[jax.Array], jax.Array], low: jax.Array, high: jax.Array
) -> jax.Array:
    """The largest whole number of each row in [low, high] for which `holds`, which is true at
    `low`, and false from some number on.
    """

    def narrow(_: jax.Array, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = low + (high - low) // 2 + (high - low) % 2
        good = holds(middle)
        return jnp.where(good, middle, low), jnp.where(good, high, jnp.maximum(middle - 1, low))

    return jax.lax.fori_loop(0, 33, narrow, (low, high))[0]


def by_digits(rows: Rows) -> jax.Array:
    """The k-th largest by its digits of eight bits, each from a histogram; top_p by a sort."""
    depth = jax.lax.bitcast_convert_type(jnp.where(rows.z == 0, 0.0, -rows.z), jnp.uint32)
    number = jnp.arange(rows.z.shape[0])[:, None]
    prefix, left = jnp.zeros_like(rows.top_k, jnp.uint32), rows.top_k
    for shift in (24, 16, 8, 0):
        top = jnp.uint32(0xFFFFFFFF) << (shift + 8) if shift < 24 else jnp.uint32(0)
        mine = (depth & top) == prefix
        digit = ((depth >> shift) & 255).astype(jnp.int32)
        counts = jnp.zeros((rows.z.shape[0], 256), jnp.int32).at[number, digit].add(mine)
        upto = jnp.cumsum(counts, axis=1)
        chosen = (upto < left).sum(axis=1, keepdims=True)
        left = left - jnp.take_along_axis(upto - counts, chosen, axis=1)
        prefix = prefix | (chosen.astype(jnp.uint32) << shift)
    inside = depth <= prefix
    bare = rows._replace(top_k=jnp.full_like(rows.top_k, rows.z.shape[1]))
    masses = jnp.where(inside, rows.mass, 0)
    return inside & by_sort(bare._replace(mass=masses))


def by_top_k(rows: Rows) -> jax.Array:
    """All tokens by JAX's top_k, the sums by halves of the row."""
    z, ids = jax.lax.top_k(rows.z, rows.z.shape[1])
    kth = jnp.take_along_axis(z, rows.top_k - 1, axis=1)
    mass = jnp.where(z >= kth, jnp.exp(z), 0)
    before = jax.lax.associative_scan(jnp.add, mass, axis=1) - mass
    within = (z >= kth) & ((before < rows.top_p * total_of(mass)) | (rows.top_p >= 1))
    return jnp.zeros(z.shape, bool).at[jnp.arange(len(z))[:, None], ids].set(within)


def one_by_one(rows: Rows) -> jax.Array:
    """The best token that is left, until the share is reached; for small vocabularies."""
    if rows.z.shape[1] > 1000:
        given = f"a vocabulary of {rows.z.shape[1]} tokens"
        raise UnsupportedError(given, "at most 1000 tokens", "Choose another kernel.")
    inside = in_top_k(rows)
    mass = jnp.where(inside, rows.mass, -1)
    wanted = rows.top_p * total_of(jnp.maximum(mass, 0))
    number = jnp.arange(len(mass))

    def take(_: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        rest, before, kept = state
        best = jnp.argmax(rest, axis=1)
        each = rest[number, best]
        kept = kept.at[number, best].max((before < wanted[:, 0]) & (each >= 0))
        return rest.at[number, best].set(-2), before + jnp.maximum(each, 0), kept

    begin = mass, jnp.zeros(len(mass)), jnp.zeros(mass.shape, bool)
    kept = jax.lax.fori_loop(0, mass.shape[1], take, begin)[2]
    return kept | (inside & (rows.top_p >= 1))


def on_host(rows: Rows) -> jax.Array:
    """NumPy's sort, with sums in f64."""

    def keep(z: np.ndarray, mass: np.ndarray, top_k: np.ndarray, top_p: np.ndarray) -> np.ndarray:
        z, mass, top_k, top_p = (np.asarray(x) for x in (z, mass, top_k, top_p))
        kept = np.zeros(z.shape, bool)
        for row in range(len(z)):
            kth = np.sort(z[row])[-top_k[row, 0]]
            each = np.where(z[row] >= kth, mass[row], 0).astype(np.float64)
            order = np.argsort(-each, kind="stable")
            before = np.cumsum(each[order]) - each[order]
            kept[row, order] = before < top_p[row, 0] * each.sum()
            kept[row] |= top_p[row, 0] >= 1
            kept[row] &= z[row] >= kth
        return kept

    shape = jax.ShapeDtypeStruct(rows.z.shape, jnp.bool)
    found: jax.Array = jax.pure_callback(keep, shape, *rows[:4])
    return found


Draw = Literal["largest", "blocks", "race", "order"]


@dataclasses.dataclass(frozen=True)
class Sample:
    """See the module. `draw`: the largest score of all; of blocks of tokens, then of blocks; the
    shortest time of exponential clocks; or the largest score among tokens in order of z. `each`:
    one row after the other. `base2`: the noise by logarithms to the base 2.
    """

    keep: KeepWay
    draw: Draw = "largest"
    each: bool = False
    base2: bool = False

    def __call__(
        self,
        z: jax.Array,
        seeds: jax.Array,
        *,
        top_k: jax.Array,
        top_p: jax.Array,
        min_p: jax.Array,
    ) -> jax.Array:
        given = z, seeds, top_k, top_p, min_p
        if self.each:
            one = jax.tree.map(lambda x: x[:, None], given)
            return jax.lax.map(lambda row: self.rows(*row)[0], one)
        return self.rows(*given)

    def rows(
        self,
        z: jax.Array,
        seeds: jax.Array,
        top_k: jax.Array,
        top_p: jax.Array,
        min_p: jax.Array,
    ) -> jax.Array:
        """The op for any number of rows."""
        rows = Rows(z, jnp.exp(z), top_k[:, None], top_p[:, None], min_p[:, None])
        best = jnp.argmax(z, axis=1)
        kept = self.keep(rows) & (rows.mass >= rows.min_p)
        kept = kept.at[jnp.arange(len(z)), best].set(True)
        drawn = self.drawn(z, kept, seeds)
        return jnp.where(top_k == 1, best, drawn).astype(jnp.int32)

    def drawn(self, z: jax.Array, kept: jax.Array, seeds: jax.Array) -> jax.Array:
        """The kept token with the largest score; the lowest id if several are equal."""
        ids = jnp.arange(z.shape[1], dtype=jnp.int32)[None]
        if self.draw == "order":
            order = jnp.argsort(z, axis=1).astype(jnp.int32)
            z, kept = (jnp.take_along_axis(x, order, axis=1) for x in (z, kept))
            scores = jnp.where(kept, z + gumbel_noise(seeds, order), -jnp.inf)
            is_best = scores == scores.max(axis=1, keepdims=True)
            return jnp.where(is_best, order, z.shape[1]).min(axis=1)
        noise = gumbel_noise(seeds, ids)
        if self.base2:
            noise = jnp.log2(jnp.exp(noise)) * np.float32(math.log(2))
        if self.draw == "race":
            times = jnp.exp(-noise) / jnp.exp(z)
            return jnp.argmin(jnp.where(kept, times, jnp.inf), axis=1)
        scores = jnp.where(kept, z + noise, -jnp.inf)
        if self.draw == "largest":
            return jnp.argmax(scores, axis=1)
        missing = -z.shape[1] % 96
        scores = jnp.pad(scores, ((0, 0), (0, missing)), constant_values=-jnp.inf)
        blocks = scores.reshape(len(z), -1, 96)
        place = jnp.argmax(blocks, axis=2)
        block = jnp.argmax(blocks.max(axis=2), axis=1)
        return block * 96 + jnp.take_along_axis(place, block[:, None], axis=1)[:, 0]


full_sort = Sample(by_sort)
ascending = Sample(from_the_end, "blocks")
bisection = Sample(by_bisection)
digits = Sample(by_digits, "order")
all_best = Sample(by_top_k, "race")
small = Sample(one_by_one)
row_by_row = Sample(by_sort, "order", each=True)
bisected_rows = Sample(by_bisection, "blocks", each=True)
host = Sample(on_host)
base_two = Sample(by_top_k, base2=True)
