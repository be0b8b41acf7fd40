"""The op sample in plain JAX. It draws among the best tokens, and searches the whole vocabulary
only for rows that need it.

The noise of a token depends on its id only, so both ways of finding the kept tokens draw the same
one:

    ==========  ===================================  =========================================
    rows        how kept tokens are found            when it is computed
    ==========  ===================================  =========================================
    few kept    sort the NUM_CANDIDATES best ones    a row of the step keeps less than all
    many kept   bisect a threshold per row           a row's border is not among its candidates
    ==========  ===================================  =========================================

The row alone decides which way its token is found. Other rows only decide what is computed.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from enginebay.ops.sampling import INF_BITS, first_best, gumbel_noise, least_that_holds
from enginebay.ops.update_rows import update_rows

NUM_CANDIDATES = 256
"""How many best tokens are sorted. A partial sort of 256 costs little more than finding the best
one.
"""

ROWS_AT_ONCE = 4
"""Rows per group on a CPU. A CPU pays for results that a row does not need, and few rows fill its
vector units as well as many.
"""

NO_MASS_BITS = 0x42D00000
"""The bits of 104.0. exp(-104) is 0 in f32, so tokens at this depth have no probability."""


class _Rows(NamedTuple):
    """The op's arguments with an axis for tokens [S, 1], and values derived from them.

    z is f32 [S, vocab]. total f32 [S, 1] is the sum of exp(z). min_z f32 [S, 1] is min_p as the
    smallest z that is kept.
    """

    z: jax.Array
    seeds: jax.Array
    total: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_z: jax.Array


def sample(
    z: jax.Array, seeds: jax.Array, *, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    """Return token ids int32 [S]; SampleOp describes the arguments.

    A CPU computes a few rows at a time, and skips rows that take the best token. Other platforms
    compute all rows together.
    """
    asked = (z, seeds, top_k[:, None], top_p[:, None], jnp.log(min_p)[:, None])

    def draw(*asked: jax.Array, rows_at_once: int | None) -> jax.Array:
        best = first_best(asked[0])
        chosen: jax.Array = update_rows(top_k != 1, _drawn, best, asked, rows_at_once=rows_at_once)
        return chosen

    on_cpu, elsewhere = (functools.partial(draw, rows_at_once=n) for n in (ROWS_AT_ONCE, None))
    drawn: jax.Array = lax.platform_dependent(*asked, cpu=on_cpu, default=elsewhere)
    return drawn


def _drawn(best: jax.Array, asked: tuple[jax.Array, ...]) -> jax.Array:
    """Return token ids int32 [S] of rows that sample."""
    del best
    z, seeds, top_k, top_p, min_z = asked
    rows = _Rows(z, seeds, jnp.exp(z).sum(axis=-1, keepdims=True), top_k, top_p, min_z)
    cuts = (top_k < z.shape[-1]) | (top_p < 1.0) | (min_z > -jnp.inf)
    none = jnp.zeros(z.shape[0], jnp.int32), jnp.zeros_like(cuts)
    chosen, settled = lax.cond(jnp.any(cuts), lambda: _among_candidates(rows), lambda: none)

    def over_all() -> jax.Array:
        return jnp.where(settled[:, 0], chosen, _among_all(rows, ~settled))

    return lax.cond(jnp.all(settled), lambda: chosen, over_all)


def _among_candidates(rows: _Rows) -> tuple[jax.Array, jax.Array]:
    """Draw among each row's best tokens.

    Returns ids int32 [S], and bool [S, 1]: whether all kept tokens were among the candidates. They
    were if the last candidate is dropped, or the candidates are the whole vocabulary.
    """
    vocab = rows.z.shape[-1]
    num = min(NUM_CANDIDATES, vocab)
    # Without a barrier XLA would move slices of the result into the operation, and lower it to a
    # whole sort. Each result has a barrier of its own, because XLA's partitioner cannot decompose
    # one over the pair.
    z, ids = (lax.optimization_barrier(part) for part in lax.top_k(rows.z, num))
    mass = jnp.exp(z)
    kth = jnp.take_along_axis(z, jnp.minimum(rows.top_k, num) - 1, axis=-1)
    cut = rows.top_k < vocab
    in_top_k = ~cut | (z >= kth)
    total = jnp.where(cut, jnp.where(in_top_k, mass, 0.0).sum(axis=-1, keepdims=True), rows.total)
    before = jnp.cumsum(mass, axis=-1) - mass
    in_top_p = (rows.top_p >= 1.0) | (before < rows.top_p * total) | (jnp.arange(num) == 0)
    kept = in_top_k & in_top_p & (z >= rows.min_z)
    drawn = jnp.argmax(jnp.where(kept, z + gumbel_noise(rows.seeds, ids), -jnp.inf), axis=-1)
    best = rows.top_k == 1
    chosen = jnp.take_along_axis(ids, jnp.where(best, 0, drawn[:, None]), axis=-1)[:, 0]
    # The mass that top_p is a share of needs the k-th best token and all tokens equal to it.
    known = ~cut | ((rows.top_k <= num) & (z[:, -1:] < kth))
    settled = best | (known & ~kept[:, -1:]) if num < vocab else jnp.ones_like(known)
    return chosen, settled


def _among_all(rows: _Rows, open_rows: jax.Array) -> jax.Array:
    """Draw among all kept tokens: ids int32 [S], valid where open_rows [S, 1] is true."""
    vocab = rows.z.shape[-1]
    cut = open_rows & ((rows.top_k < vocab) | (rows.top_p < 1.0))
    noise = gumbel_noise(rows.seeds, jnp.arange(vocab, dtype=jnp.int32)[None])
    scores = jnp.where(rows.z >= rows.min_z, rows.z + noise, -jnp.inf)

    def cut_scores() -> jax.Array:
        return jnp.where(~cut | _inside_top_k_and_top_p(rows), scores, -jnp.inf)

    return first_best(lax.cond(jnp.any(cut), cut_scores, lambda: scores))


def _inside_top_k_and_top_p(rows: _Rows) -> jax.Array:
    """Return bool [S, vocab]: whether a token passes top_k and top_p.

    Equal tokens at the border of top_p pass in the order of their ids. Both borders are found
    without sorting, by bisection over the bits of |z|, which takes 31 and 30 masked sums.
    """
    depth = lax.bitcast_convert_type(jnp.abs(rows.z), jnp.int32)
    mass = jnp.exp(rows.z)

    def down_to(limit: jax.Array, values: jax.Array) -> jax.Array:
        return jnp.where(depth <= limit, values, 0).sum(axis=-1, keepdims=True)

    has_k, has_p = rows.top_k < rows.z.shape[-1], rows.top_p < 1.0
    deepest = jnp.full_like(rows.top_k, INF_BITS)
    count = jnp.ones_like(depth)
    kth = least_that_holds(
        lambda limit: down_to(limit, count) >= rows.top_k, jnp.where(has_k, 0, deepest), deepest
    )
    wanted = rows.top_p * down_to(kth, mass)
    deepest = jnp.where(has_p, jnp.minimum(kth, NO_MASS_BITS), kth)
    border = least_that_holds(
        lambda limit: down_to(limit, mass) >= wanted, jnp.where(has_p, 0, deepest), deepest
    )
    each = jnp.exp(-lax.bitcast_convert_type(border, jnp.float32))
    room = jnp.maximum(jnp.ceil((wanted - down_to(border - 1, mass)) / each), 1.0)
    at_border = (depth == border) & has_p
    crowded = at_border.sum(axis=-1, keepdims=True) > room

    def first_of_equals() -> jax.Array:
        earlier = jnp.cumsum(at_border.astype(jnp.int32), axis=-1) - 1
        return (depth <= border) & ~(at_border & crowded & (earlier >= room))

    return lax.cond(jnp.any(crowded), first_of_equals, lambda: depth <= border)
