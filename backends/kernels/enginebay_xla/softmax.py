"""Masks, scores and the online softmax, which all forms of attention here share. All are f32."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from enginebay.ops.spec import AttnSpec

MASKED = -1e30
"""Score of a masked key. It is finite, so that the difference of two is a number."""

LOWEST = MASKED / 2
"""Lower bound of the maximum. With it exp(MASKED - maximum) is 0 even where no key is visible, so
that no second mask is needed.
"""


class Partial(NamedTuple):
    """The softmax over the keys so far: maximum, sum of exponentials, and their weighted values."""

    maximum: jax.Array
    total: jax.Array
    weighted: jax.Array


def empty_partial(queries: jax.Array, v_dim: int) -> Partial:
    """Return the state before the first key, for queries [..., head_dim] and values of `v_dim`.

    It is computed from the queries, so that under shard_map it varies over the same axes.
    """
    fill = functools.partial(jnp.full_like, queries, dtype=jnp.float32)
    rows = queries.shape[:-1]
    return Partial(fill(LOWEST, shape=rows), fill(0, shape=rows), fill(0, shape=(*rows, v_dim)))


def batched_dot(a: jax.Array, b: jax.Array, contract: tuple[int, int], num_batch: int) -> jax.Array:
    """Multiply a and b over the axes `contract`; the first `num_batch` axes are batch axes.

    Sums are f32. f32 operands are multiplied in full f32 on every platform, because other
    implementations are compared with this one.
    """
    batch = tuple(range(num_batch))
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    numbers = (((contract[0],), (contract[1],)), (batch, batch))
    return jax.lax.dot_general(
        a, b, numbers, precision=precision, preferred_element_type=jnp.float32
    )


def visible_keys(
    key_positions: jax.Array, positions: jax.Array, kv_len: jax.Array, spec: AttnSpec
) -> jax.Array:
    """Return bool: which keys a query sees. The three arrays are broadcast against each other."""
    visible = key_positions < kv_len
    if spec.causal:
        visible &= key_positions <= positions
    if spec.window is not None:
        visible &= key_positions > positions - spec.window
    return visible


def scale_scores(
    products: jax.Array,
    away: jax.Array,
    visible: jax.Array,
    spec: AttnSpec,
    inputs: Mapping[str, jax.Array],
) -> jax.Array:
    """Turn query-key products [..., queries, keys] into scores: scale, softcap, slopes, and MASKED
    where not visible.

    away: position of the key less that of the query; with `visible`, broadcast against the
    products. inputs: HEAD_INPUTS by name, each broadcast against [..., queries].
    """
    scores = products * spec.softmax_scale
    if spec.softcap is not None:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    if "slopes" in inputs:
        scores = scores + inputs["slopes"][..., None] * away
    return jnp.where(visible, scores, MASKED)


def add_keys(state: Partial, scores: jax.Array, v: jax.Array) -> Partial:
    """Return the state after more keys.

    scores is [heads, queries, keys], v [heads, keys, head_dim]; both are finite.
    """
    maximum = jnp.maximum(state.maximum, scores.max(axis=-1))
    weights = jnp.exp(scores - maximum[..., None])
    keep = jnp.exp(state.maximum - maximum)
    values = batched_dot(weights.astype(v.dtype), v, (2, 1), 1)
    return Partial(
        maximum,
        state.total * keep + weights.sum(axis=-1),
        state.weighted * keep[..., None] + values,
    )


def finish(state: Partial, inputs: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return (output, log-sum-exp) in f32.

    A sink is a score without a value; inputs are as for `scale_scores`. A query without
    visible keys gives 0, and without a sink its log-sum-exp is LOWEST.
    """
    maximum, total, weighted = state
    if "sinks" in inputs:
        sinks = inputs["sinks"].astype(jnp.float32)
        higher = jnp.maximum(maximum, sinks)
        keep = jnp.exp(maximum - higher)
        maximum, total, weighted = (
            higher,
            total * keep + jnp.exp(sinks - higher),
            weighted * keep[..., None],
        )
    total = jnp.where(total == 0, 1.0, total)
    return weighted / total[..., None], maximum + jnp.log(total)


@functools.cache
def is_cpu() -> bool:
    """Return whether programs are compiled for CPUs, which are fast with other shapes."""
    return jax.default_backend() == "cpu"
