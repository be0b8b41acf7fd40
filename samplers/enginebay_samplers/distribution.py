"""Shared by processors that remove tokens by their probability after temperature."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from enginebay.contracts.sampler import SamplingState


class Distribution(NamedTuple):
    """log_p f32 [S, vocab]: natural logarithms of what the rows' temperatures make of logits; -inf
    where impossible.

    is_drawn bool [S, 1]: whether the row is drawn from it; at temperature 0 the first best token is
    taken, and log_p is that of temperature 1. best bool [S, vocab]: the most likely tokens.
    """

    log_p: jax.Array
    is_drawn: jax.Array
    best: jax.Array


def distribution(logits: jax.Array, state: SamplingState) -> Distribution:
    """Of logits f32 [S, vocab]. A row without a possible token has none: every log_p is -inf."""
    is_drawn = (state.params.temperature >= jnp.finfo(jnp.float32).tiny)[:, None]
    highest = logits.max(axis=-1, keepdims=True)
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    z = (logits - highest) / jnp.where(is_drawn, state.params.temperature[:, None], 1.0)
    total = jnp.exp(z).sum(axis=-1, keepdims=True)
    return Distribution(z - jnp.log(jnp.maximum(total, 1.0)), is_drawn, logits == highest)


def keep(logits: jax.Array, kept: jax.Array, given: Distribution) -> jax.Array:
    """logits with -inf where not `kept` bool [S, vocab], in rows that are drawn."""
    return jnp.where(kept | ~given.is_drawn, logits, -jnp.inf)
