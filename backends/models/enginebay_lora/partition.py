"""How calls of the op lora are split over devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from enginebay.ops.partition_rules import Partition, Shards
from enginebay_lora.ops import LoraOp


def lora_partition(
    impl: LoraOp,
    y: Any,
    x: Any,
    a: Any,
    b: Any,
    places: Any,
    *,
    axis: int = 0,
    ends: Sequence[int] = (),
) -> Partition:
    """Split the op as the linear layer that it is added to; the dimension of the parts is whole on
    every device.

    If the inputs are split, each device computes the product of its share of the inputs, and the
    products are summed over devices in f32. If the outputs are split, each device computes its
    outputs.
    """
    inner = " ".join(f"i{i}" for i in range(x.ndim - 1))
    outer = " ".join(f"o{i}" for i in range(y.ndim - 1))

    def run(
        shards: Shards, y: jax.Array, x: jax.Array, a: jax.Array, b: jax.Array, places: jax.Array
    ) -> jax.Array:
        if not shards.axes:
            return impl(y, x, a, b, places, axis=axis, ends=ends)
        zeros = jnp.zeros(y.shape, jnp.float32)
        added = shards.reduce(impl(zeros, x, a, b, places, axis=axis, ends=ends))
        return (y.astype(jnp.float32) + added).astype(y.dtype)

    inputs = (f"t {outer}", f"t {inner}", f"s p r {inner}", f"s r {outer}", "t")
    return Partition(inputs, (f"t {outer}",), run, reduced=tuple(inner.split()))
