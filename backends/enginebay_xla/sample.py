"""The op sample in plain JAX: a draw among the best tokens, over the whole vocabulary only for rows
that need it.

The noise of a token belongs to it, so a row's token is the same however the kept tokens were found:

    ==========  ===================================  =========================================
    rows        kept tokens found by                 paid
    ==========  ===================================  =========================================
    few kept    the NUM_CANDIDATES best, in order    when any row keeps less than all
    many kept   a threshold per row, by bisection    when a row's border is no candidate
    ==========  ===================================  =========================================

Which of these answers a row depends on that row alone; what its neighbours need decides only what
is computed besides.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from enginebay_numerics.rows import update_rows
from enginebay_numerics.sampling import INF_BITS, first_best, gumbel_noise, least_that_holds

NUM_CANDIDATES = 256
"""How many best tokens are put in order: a partial sort of 256 costs little more than finding the
best one.
"""

ROWS_AT_ONCE = 4
"""On a CPU: what is computed for rows that need it not is work there, while few rows fill the
vector units as many do.
"""

NO_MASS_BITS = 0x42D00000
"""The bits of 104.0: exp(-104) is 0 in f32, so no border of mass lies deeper."""


class _Rows(NamedTuple):
    """What both ways share: the op's arguments with an axis for tokens [S, 1], and sums of them.

    z f32 [S, vocab]. total f32 [S, 1]: sum of exp(z). min_z f32 [S, 1]: min_p as the least z that
    is kept.
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
    """Token ids int32 [S], by the contract of enginebay.ops.bound.SampleOp.

    On a CPU a few rows at a time, and only those that do not take the best token; elsewhere all
    together.
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
    """Token ids int32 [S] of rows that all may be drawn."""
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
    """Draw among each row's best tokens: ids int32 [S], and bool [S, 1], whether all kept tokens
    were among them.

    They were when the last candidate is dropped, or when the candidates are the whole vocabulary.
    """
    vocab = rows.z.shape[-1]
    num = min(NUM_CANDIDATES, vocab)
    # A barrier keeps slices of the result out of the operation, which XLA would then lower to a
    # whole sort. One each: a barrier over the pair takes the operation itself as its operand, which
    # XLA's partitioner cannot decompose.
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
    # Without the k-th best, and all that equal it, the mass that top_p is a share of is not known.
    known = ~cut | ((rows.top_k <= num) & (z[:, -1:] < kth))
    settled = best | (known & ~kept[:, -1:]) if num < vocab else jnp.ones_like(known)
    return chosen, settled


def _among_all(rows: _Rows, open_rows: jax.Array) -> jax.Array:
    """Draw among all kept tokens of the vocabulary: ids int32 [S], which mean nothing where not
    open_rows [S, 1].
    """
    vocab = rows.z.shape[-1]
    cut = open_rows & ((rows.top_k < vocab) | (rows.top_p < 1.0))
    noise = gumbel_noise(rows.seeds, jnp.arange(vocab, dtype=jnp.int32)[None])
    scores = jnp.where(rows.z >= rows.min_z, rows.z + noise, -jnp.inf)

    def cut_scores() -> jax.Array:
        return jnp.where(~cut | _inside_top_k_and_top_p(rows), scores, -jnp.inf)

    return first_best(lax.cond(jnp.any(cut), cut_scores, lambda: scores))


def _inside_top_k_and_top_p(rows: _Rows) -> jax.Array:
    """bool [S, vocab], whether a token passes top_k and top_p, equal ones at top_p's border in
    order of their ids.

    Instead of sorting, both borders are found by bisection over the bits of |z|: 31 and 30 masked
    sums.
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
