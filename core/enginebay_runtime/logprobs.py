"""Log-probabilities of sampled tokens, inside the compiled step, for the rows that ask for them."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax, tree_util

from enginebay.ops.update_rows import update_rows
from enginebay.types import MAX_LOGPROBS


@functools.partial(
    tree_util.register_dataclass, data_fields=["token_ids", "values"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Tokens and their log-probabilities: W = MAX_LOGPROBS + 1 per sampled token, or fewer with a
    small vocabulary. The sampled token is first, then the best tokens, best first.

    token_ids int32 [..., W], values f32 [..., W]; both are undefined where no row asked.
    """

    token_ids: jax.Array
    values: jax.Array

    @staticmethod
    def empty(shape: tuple[int, ...], vocab_size: int) -> Logprobs:
        """Return log-probabilities that are all 0, for an array of sampled tokens of this shape."""
        width = num_best(vocab_size) + 1
        return Logprobs(
            jnp.zeros((*shape, width), jnp.int32), jnp.zeros((*shape, width), jnp.float32)
        )


def num_best(vocab_size: int) -> int:
    """How many best tokens are returned, for a vocabulary of this size."""
    return min(MAX_LOGPROBS, vocab_size)


def logprobs_of(
    logits: jax.Array, sampled: jax.Array, asks: jax.Array, *, rows_at_once: int | None = None
) -> Logprobs:
    """Log-probabilities [S, W] from logits f32 [S, vocab] of the model, sampled int32 [S] and asks
    bool [S].

    The values are log_softmax(logits) in f32. The cost depends on the rows that ask, see
    `update_rows`.
    """
    empty = Logprobs.empty(sampled.shape, logits.shape[-1])
    found: Logprobs = update_rows(
        asks, _of_rows, empty, (logits, sampled), rows_at_once=rows_at_once
    )
    return found


def _of_rows(_: Logprobs, given: tuple[jax.Array, jax.Array]) -> Logprobs:
    logits, sampled = given
    best, best_ids = lax.top_k(logits, num_best(logits.shape[-1]))
    # Not best[:, :1]: a second slice of top_k would make XLA:CPU sort the whole vocabulary.
    largest = logits.max(axis=-1, keepdims=True)
    own = jnp.take_along_axis(logits, sampled[:, None], axis=-1)
    log_sum = jnp.log(jnp.exp(logits - largest).sum(axis=-1, keepdims=True))
    # Subtracting `largest` first keeps the precision of log-probabilities near 0.
    values = jnp.concatenate([own, best], axis=-1) - largest - log_sum
    return Logprobs(jnp.concatenate([sampled[:, None], best_ids], axis=-1), values)
