"""What the attention paths share: masks, scores and the online softmax, all in f32."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from enginebay.ops.spec import AttnSpec

MASKED = -1e30
"""The score of a key that is not visible: finite, so that a difference of two is a number."""

LOWEST = MASKED / 2
"""No maximum is lower, so that exp(MASKED - maximum) is 0 even where nothing is visible, and needs
no second mask.
"""


class Partial(NamedTuple):
    """Softmax over the keys seen so far: maximum, sum of exponentials, and sum of exponentials
    times values.
    """

    maximum: jax.Array
    total: jax.Array
    weighted: jax.Array


def empty_partial(queries: jax.Array, v_dim: int) -> Partial:
    """No key seen yet, for queries [..., head_dim] and values of `v_dim`. Made of the queries, so
    that under shard_map it varies as they do.
    """
    fill = functools.partial(jnp.full_like, queries, dtype=jnp.float32)
    rows = queries.shape[:-1]
    return Partial(fill(LOWEST, shape=rows), fill(0, shape=rows), fill(0, shape=(*rows, v_dim)))


def batched_dot(a: jax.Array, b: jax.Array, contract: tuple[int, int], num_batch: int) -> jax.Array:
    """Product over `contract` of a and b with their first `num_batch` axes in common, accumulated
    in f32.

    f32 operands are multiplied as f32 on every platform: this is what others are compared with.
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
    """bool: which keys a query sees; the three position arrays are broadcast against each other."""
    visible = key_positions < kv_len
    if spec.causal:
        visible &= key_positions <= positions
    if spec.window is not None:
        visible &= key_positions > positions - spec.window
    return visible


def scale_scores(
    products: jax.Array, visible: jax.Array, spec: AttnSpec, bias: jax.Array | None = None
) -> jax.Array:
    """Scores of query-key products: scaled, softly capped, with a bias, MASKED where not
    visible.
    """
    scores = products * spec.softmax_scale
    if spec.softcap is not None:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    return jnp.where(visible, scores if bias is None else scores + bias, MASKED)


def add_keys(state: Partial, scores: jax.Array, v: jax.Array) -> Partial:
    """The state after more keys: scores [heads, queries, keys], v [heads, keys, head_dim], finite
    everywhere.
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


def finish(state: Partial, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(output, log-sum-exp), f32; a sink is a score without a value, broadcast against the queries.

    A query without visible keys gives 0, and LOWEST as its log-sum-exp when there is no sink.
    """
    maximum, total, weighted = state
    if sinks is not None:
        sinks = sinks.astype(jnp.float32)
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
    """Whether programs are compiled for the CPU, whose compiler likes other shapes than
    accelerators do.
    """
    return jax.default_backend() == "cpu"
