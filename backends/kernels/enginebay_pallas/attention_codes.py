"""How the attention kernel reads a quantised cache: the codes of a head, and the scales and zero
points of a chunk of keys, which multiply scores and weights.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

FP8_NORMAL, FP8_SUBNORMAL = 2.0**120, 2.0**-9
"""Factors of float8_e4m3fn: from the exponent of f32 to its own, and of the numbers below 2^-6."""


def load_codes(
    buffers: Any,
    place: tuple[Any, Any],
    head: Any,
    valid: jax.Array,
    storage: str,
    *,
    is_interpreted: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return the codes of keys and values [tokens, lanes] of a head in f32, 0 where `valid`
    [tokens, 1] is false.

    `place` is the buffer's number and a slice of tokens. A word of 32 bits has the codes of two
    heads, or of four in a `uint4` cache. References in the interpreter have one dtype, so there the
    four bytes of a word are read at once.
    """
    slot, tokens = place
    heads = 4 if storage == "uint4" else 2
    word, inside = lax.div(head, jnp.int32(heads)), lax.rem(head, jnp.int32(heads))
    step = 1 if storage == "uint4" else 2  # bytes between two heads of a word
    if is_interpreted:
        four = buffers[slot, tokens, pl.ds(word, 1)].reshape(-1, 4, buffers.shape[-1])
        if storage == "fp8":
            four = lax.bitcast_convert_type(four, jnp.uint8)
        chosen = lax.broadcasted_iota(jnp.int32, (1, 4, 1), 1) == inside * step
        four = jnp.where(valid[..., None], four.astype(jnp.int32) & 0xFF, 0)
        k = jnp.where(chosen, four, 0).sum(axis=1)
        v = jnp.where(jnp.roll(chosen, 1, axis=1), four, 0).sum(axis=1)
    else:
        words = lax.bitcast_convert_type(
            buffers.bitcast(jnp.uint32)[slot, tokens, word, 0, :], jnp.int32
        )
        words = lax.shift_right_logical(jnp.where(valid, words, 0), 8 * step * inside)
        k, v = words, lax.shift_right_logical(words, 8)
    if storage == "uint4":
        return _float(k & 15), _float(lax.shift_right_logical(k, 4) & 15)
    number = _from_fp8 if storage == "fp8" else _signed
    return number(k), number(v)


def _float(numbers: jax.Array) -> jax.Array:
    return numbers.astype(jnp.float32)


def _signed(numbers: jax.Array) -> jax.Array:
    """Return the lowest byte of int32 as a signed number."""
    return _float(lax.shift_right_arithmetic(lax.shift_left(numbers, 24), 24))


def _from_fp8(numbers: jax.Array) -> jax.Array:
    """Return the lowest byte of int32, the bits of float8_e4m3fn, as a number; not NaN."""
    size = numbers & 0x7F
    normal = lax.bitcast_convert_type(lax.shift_left(size, 20), jnp.float32) * FP8_NORMAL
    number = jnp.where(size < 8, _float(size) * FP8_SUBNORMAL, normal)
    return jnp.where((numbers & 0x80) != 0, -number, number)


def load_factors(buffer: Any, rows: Any, slot: Any, first_page: Any, valid: jax.Array) -> None:
    """Put the scales or zero points of a chunk of keys into `rows` [factors, keys], in f32.

    `buffer` has them by page [2, pages, factors, page_size]; `valid` [1, keys] are the keys whose
    factors are not 0.
    """
    count = rows.shape[1] // buffer.shape[3]
    parts = []
    for i in range(count):
        part = buffer[slot, first_page + i]
        is_int = jnp.issubdtype(part.dtype, jnp.integer)
        parts.append((part.astype(jnp.int32) if is_int else part).astype(jnp.float32))
    joined = parts[0] if count == 1 else jnp.concatenate(parts, axis=1)
    rows[...] = jnp.where(valid, joined, 0.0)
