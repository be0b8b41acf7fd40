"""Softmax over scores in memory, summed in the many ways in which attention kernels do it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

LOWEST = -1e30
"""Maximum of no scores. A hidden score is minus infinity, so its weight is exactly 0."""

Sinks = jax.Array | None
Result = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores f32 [N, Hkv, G, L] of N queries and L keys, times log2(e) with `base2`; values [L,
    Hkv, Dv] of any float dtype, 0 for keys that no query sees; sinks f32 [Hkv, G] as scores are.
    """

    scores: jax.Array
    values: jax.Array
    sinks: jax.Array | None
    base2: bool = False

    def exp(self, x: jax.Array) -> jax.Array:
        """The exponential of what scores are in."""
        return jnp.exp2(x) if self.base2 else jnp.exp(x)

    def lse(self, maximum: jax.Array, total: jax.Array) -> jax.Array:
        """The natural logarithm of `total`, which is a sum of exp(score - maximum)."""
        log = jnp.log(jnp.where(total == 0, 1.0, total))
        return maximum * math.log(2) + log if self.base2 else maximum + log

    def part(self, first: int, stop: int, step: int = 1) -> Scores:
        """Some of the keys, without sinks."""
        return Scores(
            self.scores[..., first:stop:step], self.values[first:stop:step], None, self.base2
        )


SoftmaxWay = Callable[[Scores], Result]
"""Returns (out f32 [N, Hkv, G, Dv], log-sum-exp f32 [N, Hkv, G]); both are unspecified where a
query sees no key.
"""


def products(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Weights [N, Hkv, G, L] times values, f32 [N, Hkv, G, Dv]."""
    return jnp.einsum(
        "nhgl,lhd->nhgd",
        weights,
        values,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def whole(given: Scores, *, narrow: bool = False, last: bool = False) -> Result:
    """One maximum and one sum. The weights are divided by the sum before the product, or with
    `last` the product is; with `narrow` they are rounded to the dtype of the values.
    """
    maximum = given.scores.max(axis=-1, initial=LOWEST)
    if given.sinks is not None:
        maximum = jnp.maximum(maximum, given.sinks)
    weights = given.exp(given.scores - maximum[..., None])
    total = weights.sum(axis=-1)
    if given.sinks is not None:
        total = total + given.exp(given.sinks - maximum)
    divisor = jnp.where(total == 0, 1.0, total)[..., None]
    weights = weights if last else weights / divisor
    values = given.values if narrow else given.values.astype(jnp.float32)
    weights = weights.astype(values.dtype)
    out = products(weights, values)
    return out / divisor if last else out, given.lse(maximum, total)


def two_passes(given: Scores, *, block: int) -> Result:
    """A pass over blocks of keys for the maximum, another for the sums."""
    scores, values = _in_blocks(given, block)
    maximum = jnp.full(given.scores.shape[:-1], LOWEST)
    total = jnp.zeros_like(maximum)
    if given.sinks is not None:
        maximum = jnp.maximum(maximum, given.sinks)
    maximum = jnp.maximum(maximum, jax.lax.map(lambda some: some.max(axis=-1), scores).max(axis=0))
    if given.sinks is not None:
        total = given.exp(given.sinks - maximum)

    def add(state: Result, some: tuple[jax.Array, jax.Array]) -> tuple[Result, None]:
        total, out = state
        weights = given.exp(some[0] - maximum[..., None])
        return (total + weights.sum(axis=-1), out + products(weights, some[1])), None

    out = jnp.zeros((*maximum.shape, values.shape[-1]), jnp.float32)
    (total, out), _ = jax.lax.scan(add, (total, out), (scores, values))
    return out / jnp.where(total == 0, 1.0, total)[..., None], given.lse(maximum, total)


def _in_blocks(given: Scores, block: int) -> tuple[jax.Array, jax.Array]:
    """Scores [B, N, Hkv, G, block] and values f32 [B, block, Hkv, Dv]; keys that are not there are
    hidden.
    """
    missing = -given.scores.shape[-1] % block
    none = [(0, 0)]
    scores = jnp.pad(given.scores, none * 3 + [(0, missing)], constant_values=-jnp.inf)
    values = jnp.pad(given.values.astype(jnp.float32), [(0, missing), *none * 2])
    scores = scores.reshape(*scores.shape[:-1], -1, block)
    return jnp.moveaxis(scores, -2, 0), values.reshape(-1, block, *values.shape[1:])


def online(given: Scores, *, block: int, backwards: bool = False) -> Result:
    """Blocks of keys one after the other, the first or the last one first, with a running
    maximum. A sink is where the sums begin.
    """
    length = given.scores.shape[-1]
    count = -(-length // block)
    missing = count * block - length
    scores = jnp.pad(
        given.scores, [(0, 0)] * 3 + [(0, missing)], mode="constant", constant_values=-jnp.inf
    )
    values = jnp.pad(given.values.astype(jnp.float32), [(0, missing), (0, 0), (0, 0)])
    maximum = jnp.full(scores.shape[:-1], LOWEST)
    total = jnp.zeros_like(maximum)
    if given.sinks is not None:
        maximum = jnp.broadcast_to(given.sinks, maximum.shape)
        total = jnp.ones_like(maximum)

    def add(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        maximum, total, out = state
        first = (count - 1 - i if backwards else i) * block
        some = jax.lax.dynamic_slice_in_dim(scores, first, block, axis=-1)
        higher = jnp.maximum(maximum, some.max(axis=-1))
        weights = given.exp(some - higher[..., None])
        keep = given.exp(maximum - higher)
        new = products(weights, jax.lax.dynamic_slice_in_dim(values, first, block))
        return higher, total * keep + weights.sum(axis=-1), out * keep[..., None] + new

    out = jnp.zeros((*maximum.shape, values.shape[-1]), jnp.float32)
    maximum, total, out = jax.lax.fori_loop(0, count, add, (maximum, total, out))
    return out / jnp.where(total == 0, 1.0, total)[..., None], given.lse(maximum, total)


def splits(given: Scores, *, count: int, strided: bool = False) -> Result:
    """Each split of the keys has a result of its own, and results are weighted by their
    log-sum-exp. Splits are runs of keys, or with `strided` every `count`-th key.
    """
    length = given.scores.shape[-1]
    share = -(-length // count)
    if strided:
        parts = [given.part(i, length, count) for i in range(min(count, length))]
    else:
        parts = [given.part(i, min(i + share, length)) for i in range(0, length, share)]
    found = [whole(part) for part in parts]
    outs, sums = (jnp.stack(each) for each in zip(*found, strict=True))
    if given.sinks is not None:
        sink = given.sinks * math.log(2) if given.base2 else given.sinks
        sums = jnp.concatenate([sums, jnp.broadcast_to(sink, sums.shape[1:])[None]])
        outs = jnp.concatenate([outs, jnp.zeros_like(outs[:1])])
    highest = sums.max(axis=0)
    shares = jnp.exp(sums - highest)
    total = shares.sum(axis=0)
    return (shares[..., None] * outs).sum(axis=0) / total[..., None], highest + jnp.log(total)


MergeWay = Literal["pairs", "chain"]


def log_sums(given: Scores, *, block: int, merge: MergeWay = "chain") -> Result:
    """Results of blocks are mixed by the logistic function of the difference of their log-sum-exp,
    one after the other or in a tree of pairs.
    """
    starts = range(0, given.scores.shape[-1], block)
    found = [whole(given.part(start, start + block)) for start in starts]
    if given.sinks is not None:
        sink = given.sinks * math.log(2) if given.base2 else given.sinks
        found.append((jnp.zeros_like(found[0][0]), jnp.broadcast_to(sink, found[0][1].shape)))
    while merge == "pairs" and len(found) > 2:
        pairs = [found[i : i + 2] for i in range(0, len(found), 2)]
        found = [functools.reduce(mixed, pair) for pair in pairs]
    return functools.reduce(mixed, found)


def mixed(one: Result, other: Result) -> Result:
    """The result over the keys of two results."""
    share = jax.nn.sigmoid(one[1] - other[1])[..., None]
    rest = jax.nn.sigmoid(other[1] - one[1])[..., None]
    return share * one[0] + rest * other[0], jnp.logaddexp(one[1], other[1])
