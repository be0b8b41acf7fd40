"""Shared by samplers, logits processors and implementations of the op sample: random keys, the
noise of a token, the first best token, and bisection.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from enginebay.contracts.sampler import SAMPLE_STREAM, DeviceParams, SamplingState
from enginebay.row_value import Stage
from enginebay.types import ROW_VALUES

SPREAD = 0x9E3779B9
"""Odd, so that multiplication by it is a bijection on 32 bits: the bits of the golden ratio, which
spread neighbouring ids.
"""

INF_BITS = 0x7F800000
"""The bits of f32 infinity. As integers, the bits of non-negative floats up to it have the order of
the floats.
"""

FACTORS = (0x7FEB352D, 0x846CA68B)
"""Factors of the mixer's two rounds."""


def gumbel_noise(seeds: jax.Array, ids: jax.Array) -> jax.Array:
    """Return Gumbel noise f32 [S, n] for the tokens ids int32 [S or 1, n] with the rows' seeds
    uint32 [S, 2].

    The 32 bits of a token are two rounds of a bijective integer mixer over its id (Wellons, "hash
    prospector", 2018: bias 0.17 of 1). That is ten times cheaper than a threefry block per token,
    which would dominate the cost of sampling. All 32 bits are kept where large noise comes from, so
    rare tokens keep their probability. The function is elementwise and uses operations that kernel
    languages have too: an implementation may call it or repeat it, up to the rounding of its
    logarithm.
    """
    mixed = ids.astype(jnp.uint32) * jnp.uint32(SPREAD) + seeds[:, :1]
    bits = _mix(_mix(mixed) ^ seeds[:, 1:])
    uniform = (bits >> 1).astype(jnp.int32).astype(jnp.float32) * 2.0**-31 + 2.0**-32
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1.0 - 2.0**-24)))


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(FACTORS[0])
    x = (x ^ (x >> 15)) * jnp.uint32(FACTORS[1])
    return x ^ (x >> 16)


def first_best(scores: jax.Array) -> jax.Array:
    """scores f32 [S, vocab] -> int32 [S], the lowest index of each row's largest score.

    Uses two plain reductions, which XLA vectorises; the reduction over (value, index) pairs of
    argmax takes about three times as long on CPU. The barrier keeps XLA from computing the maximum
    again per element. A row of NaNs gives an index in range.
    """
    vocab = scores.shape[-1]
    best = lax.optimization_barrier(scores.max(axis=-1, keepdims=True))
    ids = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    return jnp.minimum(jnp.where(scores == best, ids, vocab).min(axis=-1), vocab - 1)


def without_padding(logits: jax.Array, padding_from: int | None) -> jax.Array:
    """Return logits [S, vocab] with -inf from the id `padding_from` on; None: the logits as they
    are, in a program that computes nothing for it.
    """
    if padding_from is None:
        return logits
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(ids < padding_from, logits, -jnp.inf)


def has_finite_best(logits: jax.Array) -> jax.Array:
    """logits [S, vocab] -> bool [S], whether each row's largest logit is finite: false for a row
    with a NaN or with plus infinity, and for a row of minus infinity alone.

    The maximum is the one of `first_best`, so that a step that calls both computes it once.
    """
    return jnp.isfinite(logits.astype(jnp.float32).max(axis=-1, keepdims=True))[..., 0]


def least_that_holds(
    holds: Callable[[jax.Array], jax.Array], low: jax.Array, high: jax.Array
) -> jax.Array:
    """Return the least int32 limit per row [S, 1] in [low, high] for which `holds` is true; `holds`
    is monotone and true at `high`.

    Uses bisection, with as many calls as the widest row has bits. Over the bits of floats this
    replaces a sort.
    """

    def narrow(ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = low + (high - low) // 2
        enough = holds(middle)
        return jnp.where(enough, low, jnp.minimum(middle + 1, high)), jnp.where(
            enough, middle, high
        )

    return lax.while_loop(lambda ends: jnp.any(ends[0] < ends[1]), narrow, (low, high))[1]


def position_keys(state: SamplingState, stream: int = SAMPLE_STREAM) -> jax.Array:
    """Return typed keys [S]: fold_in(fold_in(key of the row, position of the row), stream)."""
    keys = jax.random.wrap_key_data(state.keys, impl="threefry2x32")

    def fold(key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, position), stream)

    return jax.vmap(fold)(keys, state.positions)


def without_stage(state: SamplingState, stage: Stage) -> SamplingState:
    """Return the same state with neutral values for all parameters of a stage. A program that
    uses it does not compute this stage.
    """
    params = {name: getattr(state.params, name) for name in ROW_VALUES}
    for name, one in ROW_VALUES.items():
        if one.stage == stage:
            params[name] = jnp.full_like(params[name], one.neutral)
    return dataclasses.replace(state, params=DeviceParams(**params))
