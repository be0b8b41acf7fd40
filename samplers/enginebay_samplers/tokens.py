"""Shared by processors that name tokens by id: sets of ids as bits, and impossible tokens."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from enginebay.contracts.constraint import num_words
from enginebay.errors import RequestError

WORD = 32
"""Bits of a word."""


def ban(logits: jax.Array, banned: jax.Array) -> jax.Array:
    """Return logits f32 [S, vocab] with -inf where `banned` bool [S, vocab].

    A row that would have no possible token keeps its logits. This happens when other processors
    have banned the remaining tokens; the first processor then wins.
    """
    left = jnp.where(banned, -jnp.inf, logits)
    some = jnp.any(left > -jnp.inf, axis=-1, keepdims=True)
    return jnp.where(some, left, logits)


def is_among(ids: jax.Array, vocab: int) -> jax.Array:
    """Return bool [S, vocab]: whether a token is among the row's ids int32 [S, n].

    The id `vocab` marks an unused place.
    """
    row = jnp.arange(ids.shape[0])[:, None]
    return jnp.zeros((ids.shape[0], vocab), bool).at[row, ids].set(True, mode="drop")


def to_bits(ids: Iterable[int], vocab: int) -> np.ndarray:
    """Return the set of ids as uint32 [num_words(vocab)], the lowest id in the lowest bit."""
    member = np.zeros(num_words(vocab) * WORD, bool)
    member[list(ids)] = True
    return np.packbits(member, bitorder="little").view("<u4").astype(np.uint32)


def from_bits(bits: jax.Array, vocab: int) -> jax.Array:
    """Return bool [S, vocab]: whether a token is in the row's set, uint32 [S, words]."""
    shifts = lax.broadcasted_iota(jnp.uint32, (1, 1, WORD), 2)
    return ((bits[:, :, None] >> shifts) & 1).reshape(bits.shape[0], -1)[:, :vocab] != 0


def in_bits(bits: jax.Array, ids: jax.Array) -> jax.Array:
    """Return bool [S, n]: whether ids int32 [S, n] are in the row's set, uint32 [S, words]."""
    words = jnp.take_along_axis(bits, ids // WORD, axis=-1)
    return (words >> (ids % WORD).astype(jnp.uint32)) & 1 != 0


def check_ids(what: str, ids: Iterable[int], vocab: int) -> None:
    """Raise RequestError for a token id outside the vocabulary."""
    wrong = next((i for i in ids if not 0 <= i < vocab), None)
    if wrong is not None:
        raise RequestError(
            f"{what}: token id {wrong}", f"0 to {vocab - 1}", "Use token ids of this model."
        )


def check_number(what: str, number: int, most: int) -> None:
    """Raise RequestError for more than `most` values, the places on the device."""
    if number > most:
        raise RequestError(f"{number} {what}", f"at most {most}", "Leave some out.")
