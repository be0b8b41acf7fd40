"""Full-vocabulary log-probabilities, and log-probabilities of prompts. Steps that return them are
separate programs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax, tree_util

from enginebay_runtime.logprobs import Logprobs, logprobs_of

BLOCK = 64
"""Prompt tokens whose logits exist at the same time. The logits of a whole chunk could take more
memory than the cache.
"""


@functools.partial(tree_util.register_dataclass, data_fields=["rows", "prompt"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class FullVocab:
    """Full-vocabulary log-probabilities that a step returns when a request asked for `logprobs=-1`
    or `prompt_logprobs`.

    rows f32 [S, vocab] (a decode: [S, 1, vocab]), without the vocabulary's padding: log_softmax of
    the logits that each row's token was sampled from. prompt [T, W], of a prefill only:
    log-probabilities of the target tokens and of the best tokens at each position.
    """

    rows: jax.Array
    prompt: Logprobs | None = None


def log_softmax(logits: jax.Array) -> jax.Array:
    """f32 [..., vocab]. The largest logit is subtracted before the exponentials are summed, so that
    log-probabilities near 0 keep their precision.
    """
    logits = logits.astype(jnp.float32)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - jnp.log(jnp.exp(shifted).sum(axis=-1, keepdims=True))


def prompt_logprobs(
    logits_of: Callable[[jax.Array, jax.Array | None], jax.Array],
    hidden: jax.Array,
    targets: jax.Array,
    num_token_ids: int,
    *,
    adapters: jax.Array | None = None,
) -> Logprobs:
    """Log-probabilities [T, W] of each target and of the best tokens, from hidden [T, width],
    targets int32 [T] (-1: not requested) and the adapters of the tokens int32 [T]. `logits_of`
    takes a block of hidden states and of adapters. Only ids below `num_token_ids` count.

    Logits are computed for BLOCK tokens at a time, and not at all for a block without targets.
    """
    num = targets.shape[0]
    size = min(BLOCK, num)
    padding = -num % size
    blocks = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, size, hidden.shape[1])
    wanted = jnp.pad(targets, (0, padding), constant_values=-1).reshape(-1, size)

    used = None if adapters is None else jnp.pad(adapters, (0, padding)).reshape(-1, size)

    def of_block(block: tuple[jax.Array, jax.Array, jax.Array | None]) -> Logprobs:
        own, ids, adapters = block
        asks = ids >= 0

        def of_asked() -> Logprobs:
            known = logits_of(own, adapters)[:, :num_token_ids]
            return logprobs_of(known.astype(jnp.float32), jnp.maximum(ids, 0), asks)

        return lax.cond(asks.any(), of_asked, lambda: Logprobs.empty((size,), num_token_ids))

    found = lax.map(of_block, (blocks, wanted, used))
    return jax.tree.map(lambda array: array.reshape(-1, array.shape[-1])[:num], found)
