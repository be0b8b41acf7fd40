"""The greedy sampler: the first best token of every row, whatever the row's parameters say."""

from __future__ import annotations

import jax

from enginebay.sampler import SamplingState
from enginebay_numerics.sampling import first_best


def sample(logits: jax.Array, state: SamplingState) -> jax.Array:
    """logits f32 [S, vocab] -> token ids int32 [S]; `state` is not looked at."""
    del state
    return first_best(logits)
