"""Log-probabilities of sampled tokens, inside the compiled step and only where a row of it asks."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax, tree_util

from enginebay.types import MAX_LOGPROBS
from enginebay_numerics.rows import update_rows


@functools.partial(
    tree_util.register_dataclass, data_fields=["token_ids", "values"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Tokens and their log-probabilities, W = MAX_LOGPROBS + 1 for each token that was sampled, or
    fewer with a small vocabulary: first the sampled one, then the best ones, best first.

    token_ids int32 [..., W], values f32 [..., W]; both mean nothing where no row asked.
    """

    token_ids: jax.Array
    values: jax.Array

    @staticmethod
    def empty(shape: tuple[int, ...], vocab_size: int) -> Logprobs:
        """Zeros for sampled tokens of this shape."""
        width = num_best(vocab_size) + 1
        return Logprobs(
            jnp.zeros((*shape, width), jnp.int32), jnp.zeros((*shape, width), jnp.float32)
        )


def num_best(vocab_size: int) -> int:
    """How many best tokens are told of a vocabulary."""
    return min(MAX_LOGPROBS, vocab_size)


def logprobs_of(
    logits: jax.Array, sampled: jax.Array, asks: jax.Array, *, rows_at_once: int | None = None
) -> Logprobs:
    """logits f32 [S, vocab] as the model gave them, sampled int32 [S], asks bool [S] -> [S, W].

    The values are log_softmax(logits) in f32. What it costs is what the rows that ask cost: see
    `update_rows`.
    """
    empty = Logprobs.empty(sampled.shape, logits.shape[-1])
    told: Logprobs = update_rows(asks, _told, empty, (logits, sampled), rows_at_once=rows_at_once)
    return told


def _told(_: Logprobs, given: tuple[jax.Array, jax.Array]) -> Logprobs:
    logits, sampled = given
    best, best_ids = lax.top_k(logits, num_best(logits.shape[-1]))
    largest = logits.max(
        axis=-1, keepdims=True
    )  # a second slice of top_k would make XLA:CPU sort all
    own = jnp.take_along_axis(logits, sampled[:, None], axis=-1)
    log_sum = jnp.log(jnp.exp(logits - largest).sum(axis=-1, keepdims=True))
    return Logprobs(
        jnp.concatenate([sampled[:, None], best_ids], axis=-1),
        jnp.concatenate([own, best], axis=-1)
        - largest
        - log_sum,  # so that nothing is lost of one near 0
    )
