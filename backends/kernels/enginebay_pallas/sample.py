"""The op sample on TPUs: finds the borders of top_k and top_p by bisection, without sorting.

A row of the vocabulary stays in VMEM. A border is the smallest depth, in bits of |z|, at which the
row has enough tokens (top_k) or enough mass (top_p); 31 masked sums over VMEM find each. Then one
pass finds the first largest z + noise of the kept tokens. A block of rows without top_k or without
top_p skips the sums for it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from enginebay.ops.sampling import gumbel_noise
from enginebay_pallas.generations import LANES, MIB, round_up
from enginebay_pallas.interpret import interpreting

ROWS = 8
"""Rows of a block: the sublanes of a register of 32-bit values."""

CHUNK = 16 * LANES
"""Tokens per iteration of a loop over the vocabulary."""

INF_BITS = 0x7F800000
"""The bits of f32 infinity. The bits of non-negative floats, as integers, are ordered as the
floats.
"""

NUM_BITS = 31
"""Halvings that reduce INF_BITS values to one."""


class SampleBounds(NamedTuple):
    """The op's arguments of a block, each a column [ROWS, 1].

    min_z is min_p as the smallest z that is kept.
    """

    seeds: Any
    top_k: Any
    top_p: Any
    min_z: Any


@dataclasses.dataclass(frozen=True)
class PallasSample:
    """The op sample; SampleOp describes it. The vocabulary must have less than 2**24 tokens."""

    is_interpreted: bool = False

    def interpreted(self) -> PallasSample:
        """Return the same kernel, run by Pallas' TPU interpreter."""
        return dataclasses.replace(self, is_interpreted=True)

    def __call__(
        self,
        z: jax.Array,
        seeds: jax.Array,
        *,
        top_k: jax.Array,
        top_p: jax.Array,
        min_p: jax.Array,
    ) -> jax.Array:
        """Return token ids int32 [S] for z f32 [S, vocab]; seeds are [S, 2], the rest [S]."""
        run = interpreting(_sample) if self.is_interpreted else _sample
        return run(z, seeds, top_k, top_p, jnp.log(min_p))


def _sample(
    z: jax.Array, seeds: jax.Array, top_k: jax.Array, top_p: jax.Array, min_z: jax.Array
) -> jax.Array:
    num_rows, vocab = z.shape
    chunk = min(CHUNK, round_up(vocab, LANES))
    rows, width = round_up(num_rows, ROWS), round_up(vocab, chunk)
    num_blocks = rows // ROWS
    more = (0, rows - num_rows)
    # Padding is never drawn: its z is -inf, and padding rows take the first best token only.
    z = jnp.pad(z, (more, (0, width - vocab)), constant_values=-jnp.inf)
    top_k, top_p = (
        jnp.pad(top_k, more, constant_values=1),
        jnp.pad(top_p, more, constant_values=1.0),
    )
    columns = (
        jnp.pad(seeds, (more, (0, 0))),
        top_k[:, None],
        top_p[:, None],
        jnp.pad(min_z, more)[:, None],
    )
    draws = top_k > 1
    wanted = jnp.stack([draws & (top_k < vocab), draws & (top_p < 1.0)], axis=1)
    flags = wanted.reshape(num_blocks, ROWS, 2).any(axis=1).astype(jnp.int32).reshape(-1)
    block_bytes = 4 * ROWS * width
    column = pl.BlockSpec((ROWS, 1), lambda i, _: (i, 0))
    ids = pl.pallas_call(
        functools.partial(_kernel, vocab=vocab, chunk=chunk),
        out_shape=jax.ShapeDtypeStruct((rows, LANES), jnp.int32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_blocks,),
            in_specs=[
                pl.BlockSpec((ROWS, width), lambda i, _: (i, 0)),
                pl.BlockSpec((ROWS, 2), lambda i, _: (i, 0)),
                column,
                column,
                column,
            ],
            out_specs=pl.BlockSpec((ROWS, LANES), lambda i, _: (i, 0)),
            scratch_shapes=[
                pltpu.VMEM((ROWS, width), jnp.float32),
                pltpu.VMEM((ROWS, LANES), jnp.int32),
                pltpu.VMEM((ROWS, LANES), jnp.float32),
            ],
        ),
        # Two buffers of z, its mass, and the same again: small vocabularies need it for the rest.
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=3 * block_bytes + 4 * MIB),
        name="sample",
    )(flags, z, *columns)
    return ids[:num_rows, 0]


def _kernel(
    flags: Any,
    z: Any,
    seeds: Any,
    top_k: Any,
    top_p: Any,
    min_z: Any,
    out: Any,
    mass: Any,
    border: Any,
    last_id: Any,
    *,
    vocab: int,
    chunk: int,
) -> None:
    """Draw one token for each row of a block.

    Scratch memory: mass f32 [ROWS, width] is exp(z); border int32 and last_id f32 [ROWS, LANES]
    have equal lanes. Tokens with |z| below the border are kept, and those exactly at it with ids up
    to last_id.
    """
    block = pl.program_id(0)
    over = functools.partial(_over_vocabulary, chunk=chunk, num_chunks=z.shape[1] // chunk)
    rows = SampleBounds(seeds[...], *(_all_lanes(column[...]) for column in (top_k, top_p, min_z)))
    border[...] = jnp.full_like(border, INF_BITS)
    last_id[...] = jnp.full_like(last_id, float(vocab))

    @pl.when(flags[2 * block] > 0)
    def _() -> None:
        enough = rows.top_k.astype(jnp.float32)
        kth = _least(lambda limit: _down_to(over, z, None, limit) >= enough, border[...])
        border[...] = jnp.where(rows.top_k < vocab, kth, INF_BITS)

    @pl.when(flags[2 * block + 1] > 0)
    def _() -> None:
        def weigh(at: Any, _: Any) -> None:
            mass[:, at] = jnp.exp(z[:, at])

        over(weigh, None)
        _cut_top_p(over, rows, z, mass, border, last_id)

    out[...] = jnp.minimum(_draw(over, rows, z, border[...], last_id[...]), vocab - 1)


Over = Callable[[Callable[[Any, Any], Any], Any], Any]
"""_over_vocabulary with its chunk size and number of chunks."""


def _over_vocabulary(
    step: Callable[[Any, Any], Any], carry: Any, *, chunk: int, num_chunks: int
) -> Any:
    """Fold step(slice of LANES tokens, carry) -> carry over the vocabulary, in order."""

    def turn(i: Any, carry: Any) -> Any:
        for part in range(chunk // LANES):
            start = pl.multiple_of(i * chunk + part * LANES, LANES)
            carry = step(pl.ds(start, LANES), carry)
        return carry

    return lax.fori_loop(0, num_chunks, turn, carry)


def _all_lanes(column: Any) -> Any:
    return jnp.broadcast_to(column, (ROWS, LANES))


def _depth(z: Any) -> Any:
    """Return the bits of |z| as int32; a deeper token is less likely."""
    return lax.bitcast_convert_type(jnp.abs(z), jnp.int32)


def _down_to(over: Over, z: Any, mass: Any, limit: Any) -> Any:
    """Return the mass of the tokens down to a depth, or their number where mass is None.

    The result is f32, the same in every lane.
    """

    def add(at: Any, total: Any) -> Any:
        values = jnp.ones((ROWS, LANES), jnp.float32) if mass is None else mass[:, at]
        return total + jnp.where(_depth(z[:, at]) <= limit, values, 0.0)

    return _lane_sum(over(add, jnp.zeros((ROWS, LANES), jnp.float32)))


def _lane_sum(values: Any) -> Any:
    return _all_lanes(values.sum(axis=1, keepdims=True))


def _least(holds: Callable[[Any], Any], high: Any, num_bits: int = NUM_BITS) -> Any:
    """Return per row the smallest int32 in [0, high] for which the monotone `holds` is true."""

    def narrow(_: Any, ends: tuple[Any, Any]) -> tuple[Any, Any]:
        low, high = ends
        middle = low + lax.shift_right_logical(high - low, 1)
        enough = holds(middle)
        return jnp.where(enough, low, jnp.minimum(middle + 1, high)), jnp.where(
            enough, middle, high
        )

    return lax.fori_loop(0, num_bits, narrow, (jnp.zeros_like(high), high))[1]


def _cut_top_p(
    over: Over, rows: SampleBounds, z: Any, mass: Any, border: Any, last_id: Any
) -> None:
    """Move the border to where top_p's share of the mass ends; among equal tokens, by their ids."""
    kth = border[...]
    cut = rows.top_p < 1.0
    wanted = rows.top_p * _down_to(over, z, mass, kth)
    least = _least(lambda limit: _down_to(over, z, mass, limit) >= wanted, kth)
    deepest = jnp.where(cut, least, kth)
    each = jnp.exp(-lax.bitcast_convert_type(deepest, jnp.float32))
    room = jnp.maximum(jnp.ceil((wanted - _down_to(over, z, mass, deepest - 1)) / each), 1.0)

    def equals(last: Any) -> Any:
        def add(at: Any, total: Any) -> Any:
            inside = (_depth(z[:, at]) == deepest) & (_ids(at) <= last)
            return total + jnp.where(inside, 1.0, 0.0)

        return _lane_sum(over(add, jnp.zeros((ROWS, LANES), jnp.float32)))

    everything = jnp.full((ROWS, LANES), z.shape[1], jnp.int32)
    crowded = cut & (equals(everything) > room)
    border[...] = deepest

    @pl.when(jnp.max(jnp.where(crowded, 1.0, 0.0)) > 0.0)
    def _() -> None:
        last = _least(lambda last: equals(last) >= room, everything, z.shape[1].bit_length())
        last_id[...] = jnp.where(crowded, last.astype(jnp.float32), last_id[...])


def _ids(at: Any) -> Any:
    return at.start + lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 1)


def _draw(over: Over, rows: SampleBounds, z: Any, border: Any, last_id: Any) -> Any:
    """Return the id of the first largest score of the kept tokens: int32 [ROWS, LANES]."""
    first_best = rows.top_k == 1

    def look(at: Any, best: tuple[Any, Any]) -> tuple[Any, Any]:
        scores, ids = best
        here, own = z[:, at], _ids(at)
        score = jnp.where(first_best, here, here + gumbel_noise(rows.seeds, own))
        depth = _depth(here)
        kept = (depth < border) | ((depth == border) & (own.astype(jnp.float32) <= last_id))
        kept = (kept & (here >= rows.min_z)) | (first_best & (depth == 0))
        better = kept & (score > scores)  # of equal scores in a lane the first is kept
        return jnp.where(better, score, scores), jnp.where(better, own, ids)

    nothing = (
        jnp.full((ROWS, LANES), -jnp.inf, jnp.float32),
        jnp.full((ROWS, LANES), z.shape[1], jnp.int32),
    )
    scores, ids = over(look, nothing)
    highest = scores.max(axis=1, keepdims=True)
    # Lanes are reduced in f32, which is exact for ids below 2**24.
    first = jnp.where(scores == highest, ids.astype(jnp.float32), float(z.shape[1]))
    return _all_lanes(first.min(axis=1, keepdims=True)).astype(jnp.int32)


sample = PallasSample()
