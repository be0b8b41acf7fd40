"""The standard sampler: penalties, temperature, top_k, top_p and min_p, then one draw by Gumbel noise.

A draw is argmax(z + noise) over the tokens kept, which is a sample of softmax(z) over them (the Gumbel-max
trick: Gumbel 1954; Maddison, Tarlow and Minka, "A* sampling", 2014). The noise belongs to the row's key, its position
and the token's id, so a row's token is the same however the kept tokens were found:

    ==============  ======================================  ==============================================
    rows            kept tokens found by                    paid
    ==============  ======================================  ==============================================
    greedy          the first best                          always
    few kept        the NUM_CANDIDATES best, in order       when any row has a temperature
    many kept       a threshold per row, by bisection       when any row's border is not among the candidates
    ==============  ======================================  ==============================================

Which of these answers a row depends on that row alone; what its neighbours need decides only what is computed besides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from enginebay.sampler import SamplingState, position_keys
from enginebay_samplers.greedy import first_best
from enginebay_samplers.penalties import penalize, penalizes

NUM_CANDIDATES = 256
"""How many best tokens are put in order: a partial sort of 256 costs little more than finding the best one."""

INF_BITS = 0x7F800000
"""The bits of f32 infinity: as integers, the bits of all non-negative floats up to it are in the floats' order."""

NO_MASS_BITS = 0x42D00000
"""The bits of 104.0: exp(-104) is 0 in f32, so no border of mass lies deeper."""


class _Scaled(NamedTuple):
    """Logits after temperature, and the parameters in the form that both ways share.

    z f32 [S, vocab]: (logits - largest) / temperature, at most 0. total f32 [S, 1]: sum of exp(z). top_k int32 [S, 1]:
    vocab when off. top_p f32 [S, 1]. min_z f32 [S, 1]: min_p as the least z that is kept. seeds uint32 [S, 2].
    """

    z: jax.Array
    total: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_z: jax.Array
    seeds: jax.Array


def sample(logits: jax.Array, state: SamplingState) -> jax.Array:
    """logits f32 [S, vocab] (-inf allowed) -> token ids int32 [S], by the contract of enginebay.sampler.Sampler.

    A row of temperature 0 or top_k 1 gets the first best token exactly. While all rows are such, and none has a penalty,
    nothing else is computed.
    """
    logits = logits.astype(jnp.float32)
    best = first_best(logits)
    draws = (state.temperature >= jnp.finfo(jnp.float32).tiny) & (state.top_k != 1)

    def in_full() -> jax.Array:
        penalized = penalize(logits, state)
        likely = first_best(penalized)
        return lax.cond(
            jnp.any(draws), lambda: jnp.where(draws, _draw(penalized, draws, state), likely), lambda: likely
        )

    # One branch for rows that want nothing: logits that come out of a conditional are copied.
    return lax.cond(jnp.any(draws | penalizes(state)), in_full, lambda: best)


def token_noise(seeds: jax.Array, ids: jax.Array) -> jax.Array:
    """Gumbel noise f32 [S, n] of the tokens ids int32 [S or 1, n] under the rows' seeds uint32 [S, 2].

    The seeds come from threefry; a token's 32 bits are two rounds of a bijective integer mixer over its id (Wellons,
    "hash prospector", 2018: bias 0.17 of 1), ten times cheaper than a threefry block per token, which would be most
    of the cost of sampling. 32 bits are kept where large noise comes from, so rare tokens keep their probability.
    """
    mixed = ids.astype(jnp.uint32) * jnp.uint32(0x9E3779B9) + seeds[:, :1]
    bits = _mix(_mix(mixed) ^ seeds[:, 1:])
    uniform = (bits >> 1).astype(jnp.int32).astype(jnp.float32) * 2.0**-31 + 2.0**-32
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1.0 - 2.0**-24)))


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _draw(logits: jax.Array, draws: jax.Array, state: SamplingState) -> jax.Array:
    """Token ids int32 [S]; those of rows with `draws` False mean nothing."""
    rows = _scale(logits, draws, state)
    chosen, settled = _among_candidates(rows)
    open_rows = draws[:, None] & ~settled

    def over_all() -> jax.Array:
        return jnp.where(settled[:, 0], chosen, _among_all(rows, open_rows))

    return lax.cond(jnp.any(open_rows), over_all, lambda: chosen)


def _scale(logits: jax.Array, draws: jax.Array, state: SamplingState) -> _Scaled:
    vocab = logits.shape[-1]
    highest = logits.max(axis=-1, keepdims=True)
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    z = (logits - highest) / jnp.where(draws, state.temperature, 1.0)[:, None]
    top_k = state.top_k[:, None]
    return _Scaled(
        z=z,
        total=jnp.exp(z).sum(axis=-1, keepdims=True),
        top_k=jnp.where((top_k <= 0) | (top_k > vocab), vocab, top_k),
        top_p=state.top_p[:, None],
        min_z=jnp.log(state.min_p)[:, None],
        seeds=jax.random.key_data(position_keys(state)),
    )


def _among_candidates(rows: _Scaled) -> tuple[jax.Array, jax.Array]:
    """Draw among each row's best tokens: ids int32 [S], and bool [S, 1], whether all kept tokens were among them.

    They were when the last candidate is dropped, or when the candidates are the whole vocabulary.
    """
    vocab = rows.z.shape[-1]
    num = min(NUM_CANDIDATES, vocab)
    # A barrier keeps slices of the result out of the operation, which XLA would then lower to a whole sort. One each:
    # a barrier over the pair takes the operation itself as its operand, which XLA's partitioner cannot decompose.
    z, ids = (lax.optimization_barrier(part) for part in lax.top_k(rows.z, num))
    mass = jnp.exp(z)
    kth = jnp.take_along_axis(z, jnp.minimum(rows.top_k, num) - 1, axis=-1)
    cut = rows.top_k < vocab
    in_top_k = ~cut | (z >= kth)
    total = jnp.where(cut, jnp.where(in_top_k, mass, 0.0).sum(axis=-1, keepdims=True), rows.total)
    before = jnp.cumsum(mass, axis=-1) - mass
    in_top_p = (rows.top_p >= 1.0) | (before < rows.top_p * total) | (jnp.arange(num) == 0)
    kept = in_top_k & in_top_p & (z >= rows.min_z)
    best = jnp.argmax(jnp.where(kept, z + token_noise(rows.seeds, ids), -jnp.inf), axis=-1)
    chosen = jnp.take_along_axis(ids, best[:, None], axis=-1)[:, 0]
    # Without the k-th best, and all that equal it, the mass that top_p is a share of is not known.
    known = ~cut | ((rows.top_k <= num) & (z[:, -1:] < kth))
    settled = (known & ~kept[:, -1:]) if num < vocab else jnp.ones_like(known)
    return chosen, settled


def _among_all(rows: _Scaled, open_rows: jax.Array) -> jax.Array:
    """Draw among all kept tokens of the vocabulary: ids int32 [S]."""
    vocab = rows.z.shape[-1]
    cut = open_rows & ((rows.top_k < vocab) | (rows.top_p < 1.0))
    noise = token_noise(rows.seeds, jnp.arange(vocab, dtype=jnp.int32)[None])
    scores = jnp.where(rows.z >= rows.min_z, rows.z + noise, -jnp.inf)

    def cut_scores() -> jax.Array:
        return jnp.where(~cut | _inside_top_k_and_top_p(rows), scores, -jnp.inf)

    return first_best(lax.cond(jnp.any(cut), cut_scores, lambda: scores))


def _inside_top_k_and_top_p(rows: _Scaled) -> jax.Array:
    """bool [S, vocab], whether a token passes top_k and top_p, equal ones at top_p's border in order of their ids.

    Instead of sorting, both borders are found by bisection over the bits of |z|: 31 and 30 masked sums.
    """
    depth = lax.bitcast_convert_type(jnp.abs(rows.z), jnp.int32)
    mass = jnp.exp(rows.z)

    def down_to(limit: jax.Array, values: jax.Array) -> jax.Array:
        return jnp.where(depth <= limit, values, 0).sum(axis=-1, keepdims=True)

    has_k, has_p = rows.top_k < rows.z.shape[-1], rows.top_p < 1.0
    deepest = jnp.full_like(rows.top_k, INF_BITS)
    count = jnp.ones_like(depth)
    kth = _least(lambda limit: down_to(limit, count) >= rows.top_k, jnp.where(has_k, 0, deepest), deepest)
    wanted = rows.top_p * down_to(kth, mass)
    deepest = jnp.where(has_p, jnp.minimum(kth, NO_MASS_BITS), kth)
    border = _least(lambda limit: down_to(limit, mass) >= wanted, jnp.where(has_p, 0, deepest), deepest)
    each = jnp.exp(-lax.bitcast_convert_type(border, jnp.float32))
    room = jnp.maximum(jnp.ceil((wanted - down_to(border - 1, mass)) / each), 1.0)
    at_border = (depth == border) & has_p
    crowded = at_border.sum(axis=-1, keepdims=True) > room

    def first_of_equals() -> jax.Array:
        earlier = jnp.cumsum(at_border.astype(jnp.int32), axis=-1) - 1
        return (depth <= border) & ~(at_border & crowded & (earlier >= room))

    return lax.cond(jnp.any(crowded), first_of_equals, lambda: depth <= border)


def _least(holds: Callable[[jax.Array], jax.Array], low: jax.Array, high: jax.Array) -> jax.Array:
    """The least int32 limit per row [S, 1] in [low, high] that holds; `holds` is monotone and holds at `high`."""

    def narrow(ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = low + (high - low) // 2
        enough = holds(middle)
        return jnp.where(enough, low, jnp.minimum(middle + 1, high)), jnp.where(enough, middle, high)

    return lax.while_loop(lambda ends: jnp.any(ends[0] < ends[1]), narrow, (low, high))[1]
