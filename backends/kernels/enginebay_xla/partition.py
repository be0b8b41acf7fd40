"""Partition rules: how calls of the built-in ops are split over devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from enginebay.ops.grouped_linear import GroupedLinearOp
from enginebay.ops.linear import EmbeddingOp, LinearOp
from enginebay.ops.norm import AddRmsNormOp, RmsNormOp
from enginebay.ops.partition_rules import Partition, Shards
from enginebay.ops.sample import SampleOp


def _names(letter: str, count: int) -> str:
    return " ".join(f"{letter}{i}" for i in range(count))


def linear(
    impl: LinearOp, x: Any, weight: Any, bias: Any = None, *, out_dtype: Any = None
) -> Partition:
    """Split the product as the weight is split.

    If the weight is split over outputs, each device computes its outputs. If it is split over
    inputs, the products are summed over devices in f32, and rounded once with the bias.
    """
    inner = _names("i", x.ndim - 1)
    outer = _names("o", weight.ndim - (x.ndim - 1))

    def run(shards: Shards, x: jax.Array, weight: Any, *bias: jax.Array) -> jax.Array:
        if not shards.axes:
            return impl(x, weight, *bias, out_dtype=out_dtype)
        out = shards.reduce(impl(x, weight, out_dtype=jnp.float32))
        out = out if not bias else out + bias[0].astype(jnp.float32)
        return out.astype(out_dtype or x.dtype)

    biases = () if bias is None else (outer,)
    inputs = (f"t {inner}", f"{outer} {inner}", *biases)
    return Partition(inputs, (f"t {outer}",), run, reduced=tuple(inner.split()))


def _rows(x: Any) -> str:
    """Return axis names of x [T, features] or [T, heads, ..., features]; heads are split as KV
    heads.
    """
    heads = "" if x.ndim < 3 else f"kv_heads {_names('r', x.ndim - 3)}"
    return f"t {heads} f" if x.ndim > 1 else "f"


def rms_norm(impl: RmsNormOp, x: Any, weight: Any, *, eps: float) -> Partition:
    """Split over heads, never over the normed features."""

    def run(shards: Shards, *arrays: jax.Array) -> jax.Array:
        return impl(*arrays, eps=eps)

    return Partition((_rows(x), "f"), (_rows(x),), run)


def add_rms_norm(
    impl: AddRmsNormOp, x: Any, residual: Any, weight: Any, *, eps: float
) -> Partition:
    """Split as rms_norm is split."""

    def run(shards: Shards, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        return impl(*arrays, eps=eps)

    return Partition((_rows(x), _rows(x), "f"), (_rows(x), _rows(x)), run)


def embedding(impl: EmbeddingOp, table: Any, ids: Any) -> Partition:
    """Split the vocabulary: each device looks up the ids of its share."""

    def run(shards: Shards, table: Any, ids: jax.Array) -> jax.Array:
        local = ids - shards.index * table.shape[0]
        is_mine = (local >= 0) & (local < table.shape[0])
        rows = impl(table, jnp.clip(local, 0, table.shape[0] - 1))
        return shards.reduce(jnp.where(is_mine[:, None], rows, 0))

    return Partition(("vocab f", "t"), ("t f",), run, reduced=("vocab",))


def grouped_linear(
    impl: GroupedLinearOp, x: Any, weight: Any, group_sizes: Any, *, out_dtype: Any = None
) -> Partition:
    """Split the groups: each device multiplies the rows of its groups.

    Then it sends every device its share of the rows, so that results are split over rows.
    """

    def run(shards: Shards, x: jax.Array, weight: Any, sizes: jax.Array) -> jax.Array:
        first = shards.index * weight.shape[0]
        start = jnp.where(jnp.arange(sizes.shape[0]) < first, sizes, 0).sum()
        mine = jax.lax.dynamic_slice_in_dim(sizes, first, weight.shape[0])
        padded = jnp.pad(x, ((0, -x.shape[0] % shards.count), (0, 0)))
        out = impl(jnp.roll(padded, -start, axis=0), weight, mine, out_dtype=out_dtype)
        # Rows of other devices' groups are 0, so the sum of a row has one result and zeros.
        parts = shards.reduce(jnp.roll(out, start, axis=0))
        return parts.reshape(shards.count, -1, parts.shape[1]).sum(axis=0, dtype=parts.dtype)

    return Partition(
        ("t i", "expert o i", "g"),
        ("expert o",),
        run,
        reduced=("expert",),
        reduction="all_to_all",
        size=x.shape[0],
    )


def sample(impl: SampleOp, z: Any, seeds: Any, *, top_k: Any, top_p: Any, min_p: Any) -> Partition:
    """Gather the scores of the whole vocabulary; then each device draws the same tokens."""

    def run(shards: Shards, z: jax.Array, seeds: jax.Array, *filters: jax.Array) -> jax.Array:
        top_k, top_p, min_p = filters
        z = shards.reduce(z, dim=1)
        return impl(z, seeds, top_k=top_k, top_p=top_p, min_p=min_p)

    return Partition(
        ("s vocab", "s two", "s", "s", "s"),
        ("s",),
        run,
        reduced=("vocab",),
        reduction="all_gather",
        keywords=("top_k", "top_p", "min_p"),
    )
