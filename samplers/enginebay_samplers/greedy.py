"""The greedy sampler: takes the first best token of every row and ignores sampling parameters."""

from __future__ import annotations

import jax

from enginebay.contracts.sampler import SamplingState
from enginebay.ops.sampling import first_best


def sample(logits: jax.Array, state: SamplingState) -> jax.Array:
    """Return token ids int32 [S] of logits f32 [S, vocab]; `state` is not read."""
    del state
    return first_best(logits)
