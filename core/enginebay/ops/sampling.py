"""What implementations of the op sample share: the noise of a token, and the first best one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

SPREAD = 0x9E3779B9
"""Odd, so multiplying by it is a bijection of 32 bits: the golden ratio's bits, which part neighbouring ids."""

FACTORS = (0x7FEB352D, 0x846CA68B)
"""Of the mixer's two rounds."""


def gumbel_noise(seeds: jax.Array, ids: jax.Array) -> jax.Array:
    """Gumbel noise f32 [S, n] of the tokens ids int32 [S or 1, n] under the rows' seeds uint32 [S, 2].

    A token's 32 bits are two rounds of a bijective integer mixer over its id (Wellons, "hash prospector", 2018: bias
    0.17 of 1), ten times cheaper than a threefry block per token, which would be most of the cost of sampling. 32
    bits are kept where large noise comes from, so rare tokens keep their probability. Elementwise, and in operations
    that kernel languages have too: an implementation may call it or repeat it, to the rounding of its logarithm.
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

    Two plain reductions, which XLA vectorises; its reduction over (value, index) pairs, which argmax is,
    takes about three times as long on CPU. The barrier keeps the maximum from being computed again per
    element. A row of NaNs gives an index in range.
    """
    vocab = scores.shape[-1]
    best = lax.optimization_barrier(scores.max(axis=-1, keepdims=True))
    ids = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    return jnp.minimum(jnp.where(scores == best, ids, vocab).min(axis=-1), vocab - 1)
