"""The sampler contract: logits to tokens, as one pure function inside the compiled step."""

from __future__ import annotations

import dataclasses
import functools
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import tree_util

SAMPLE_STREAM = 0
"""The stream of a position's key that token sampling uses; other consumers of randomness take other
numbers.
"""


@functools.partial(
    tree_util.register_dataclass,
    data_fields=[
        "keys",
        "positions",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "token_ids",
        "prompt_lengths",
    ],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class SamplingState:
    """What sampling one token for each of S rows depends on, besides the logits.

    keys uint32 [S, 2]: each request's own key, folded with its completion index. positions int32
    [S]: absolute position of the token to be chosen. temperature f32 [S]: 0 is greedy. top_k int32
    [S]: 0 keeps all. top_p f32 [S]: 1 keeps all. min_p f32 [S]: 0 keeps all. presence_penalty,
    frequency_penalty f32 [S]: 0 changes nothing. repetition_penalty f32 [S]: 1 changes nothing.
    token_ids int32 [S, L]: each row's tokens by absolute position; from the row's position on they
    mean nothing. prompt_lengths int32 [S]: how many of them are the prompt's.
    """

    keys: jax.Array
    positions: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    repetition_penalty: jax.Array
    token_ids: jax.Array
    prompt_lengths: jax.Array

    def without_penalties(self) -> SamplingState:
        """The same rows, none with a penalty, as far as a program can know: what penalties cost is
        left out of it.
        """
        none = jnp.zeros_like(self.presence_penalty)
        return dataclasses.replace(
            self, presence_penalty=none, frequency_penalty=none, repetition_penalty=none + 1.0
        )


class Sampler(Protocol):
    """What a plugin registers as kind "sampler".

    Invariants (held by the conformance suite): a row's token depends on its own logits, parameters,
    tokens, key and position only, never on its row or its neighbours; penalties are applied to the
    logits first, whatever the temperature; temperature 0 and top_k 1 give the first best token of
    what they leave; temperature is applied before top_k, top_p and min_p, in this order, each on
    the renormalised rest; a token that equals the k-th best is kept.

    Penalties, in this order: a logit of a token in prompt or output is divided by the repetition
    penalty when it is positive, and multiplied when it is not; the frequency penalty is subtracted
    as often as the token is in the output; the presence penalty is subtracted when it is in the
    output at all. A sampler that declares `greedy_only` need not know penalties: requests with one
    are refused.
    """

    def __call__(self, logits: jax.Array, state: SamplingState) -> jax.Array:
        """logits f32 [S, vocab] -> token ids int32 [S]. Traced inside the step."""


def request_key(seed: int) -> jax.Array:
    """uint32 [2], the key of a request with this seed (threefry, 64 bits of seed)."""
    return jnp.asarray([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], jnp.uint32)


def position_keys(state: SamplingState, stream: int = SAMPLE_STREAM) -> jax.Array:
    """Typed keys [S] for the rows' positions: fold_in(fold_in(request key, position), stream)."""
    keys = jax.random.wrap_key_data(state.keys, impl="threefry2x32")

    def fold(key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, position), stream)

    return jax.vmap(fold)(keys, state.positions)
