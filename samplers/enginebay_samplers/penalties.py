"""Penalties: tokens that a row has already make their own scores lower, or higher, before anything else is done."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from enginebay.sampler import SamplingState


def penalize(logits: jax.Array, state: SamplingState) -> jax.Array:
    """logits f32 [S, vocab] after the rows' penalties: repetition, then frequency, then presence.

    Repetition is Keskar et al., "CTRL", 2019 (section 4.1), with negative logits multiplied; frequency and presence are
    those of the OpenAI API. While no row uses one, the logits are passed through and nothing is computed.
    """
    return lax.cond(jnp.any(penalizes(state)), lambda: _penalized(logits, state), lambda: logits)


def penalizes(state: SamplingState) -> jax.Array:
    """bool [S], whether a row has a penalty that is not neutral."""
    counted = (state.presence_penalty != 0.0) | (state.frequency_penalty != 0.0)
    return counted | (state.repetition_penalty != 1.0)


def _penalized(logits: jax.Array, state: SamplingState) -> jax.Array:
    num_rows, vocab = logits.shape
    row = jnp.arange(num_rows)[:, None]
    position = jnp.arange(state.token_ids.shape[1])[None]
    known = position < state.positions[:, None]
    written = known & (position >= state.prompt_lengths[:, None])
    seen = jnp.zeros((num_rows, vocab), bool)
    seen = seen.at[row, jnp.where(known, state.token_ids, vocab)].set(True, mode="drop")
    count = jnp.zeros((num_rows, vocab), jnp.int32)
    count = count.at[row, jnp.where(written, state.token_ids, vocab)].add(1, mode="drop")
    repetition = state.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0.0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, repeated, logits)
    logits = logits - count.astype(jnp.float32) * state.frequency_penalty[:, None]
    return logits - jnp.where(count > 0, state.presence_penalty[:, None], 0.0)
