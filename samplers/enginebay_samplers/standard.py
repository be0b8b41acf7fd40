"""The standard sampler: penalties, temperature, top_k, top_p and min_p, then one draw by Gumbel
noise.

A draw is argmax(z + noise) over the kept tokens, which is a sample of softmax(z) over them (the
Gumbel-max trick: Gumbel 1954; Maddison, Tarlow and Minka, "A* sampling", 2014). The noise is a
function of the row's key, the position and the token id, so every implementation of the op sample
draws the same token. The op runs when a row of the step has a temperature. Greedy rows cost the
search of the first best token only.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from enginebay.contracts.sampler import SamplingState
from enginebay.ops.sample import SampleOp
from enginebay.ops.sampling import first_best, position_keys
from enginebay_samplers.penalties import penalize, penalizes


def sample(logits: jax.Array, state: SamplingState, *, draw: SampleOp) -> jax.Array:
    """Return token ids int32 [S] of logits f32 [S, vocab], which may be -inf; see Sampler.

    A row with temperature 0 or top_k 1 gets the first best token exactly. If all rows are like that
    and none has a penalty, nothing else is computed. `draw` is the op sample.
    """
    logits = logits.astype(jnp.float32)
    best = first_best(logits)
    draws = (state.params.temperature >= jnp.finfo(jnp.float32).tiny) & (state.params.top_k != 1)

    def in_full() -> jax.Array:
        penalized = penalize(logits, state)
        likely = first_best(penalized)
        return lax.cond(
            jnp.any(draws),
            lambda: jnp.where(draws, _drawn(penalized, draws, state, draw), likely),
            lambda: likely,
        )

    # A branch of its own for greedy steps, because logits that leave a conditional are copied.
    return lax.cond(jnp.any(draws | penalizes(state)), in_full, lambda: best)


def _drawn(logits: jax.Array, draws: jax.Array, state: SamplingState, draw: SampleOp) -> jax.Array:
    """Return token ids int32 [S], valid for rows with `draws` True; others cost little."""
    vocab = logits.shape[-1]
    highest = logits.max(axis=-1, keepdims=True)
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    z = (logits - highest) / jnp.where(draws, state.params.temperature, 1.0)[:, None]
    top_k = jnp.where(
        (state.params.top_k <= 0) | (state.params.top_k > vocab), vocab, state.params.top_k
    )
    seeds = jax.random.key_data(position_keys(state))
    return draw(
        z,
        seeds,
        top_k=jnp.where(draws, top_k, 1),
        top_p=state.params.top_p,
        min_p=state.params.min_p,
    )
