"""The op grouped_linear with its groups split over devices: each device multiplies the rows of its
own groups, and the results are summed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from enginebay.runner.sharding import Placement
from enginebay.weights import Weight

GROUPED_LINEAR = "grouped_linear"


def split_groups(implementation: Callable[..., jax.Array], placement: Placement) -> Any:
    """The implementation for weights that lie split along the axis "expert"; itself when they are
    whole.
    """
    shards = placement.num_shards("expert")
    if shards == 1:
        return implementation
    axis = placement.rules["expert"]

    def grouped_linear(
        x: jax.Array, weight: Weight, group_sizes: jax.Array, *, out_dtype: Any = None
    ) -> jax.Array:
        num_own = group_sizes.shape[0] // shards

        def run(x: jax.Array, weight: Weight, group_sizes: jax.Array) -> jax.Array:
            first = jax.lax.axis_index(axis) * num_own
            is_before = jnp.arange(group_sizes.shape[0]) < first
            start = jnp.where(is_before, group_sizes, 0).sum()
            own = jax.lax.dynamic_slice_in_dim(group_sizes, first, num_own)
            # Rows past the own ones give 0, so the sum over devices has each row once.
            rows = jnp.roll(x, -start, axis=0)
            out = implementation(rows, weight, own, out_dtype=out_dtype)
            return jax.lax.psum(jnp.roll(out, start, axis=0), axis)

        whole = PartitionSpec()
        sharded = jax.shard_map(
            run,
            mesh=placement.mesh,
            in_specs=(whole, PartitionSpec(axis), whole),
            out_specs=whole,
            check_vma=False,
        )
        out: jax.Array = sharded(x, weight, group_sizes)
        return out

    return grouped_linear
