"""The ops all_reduce, all_gather and all_to_all, which are called inside shard_map."""

from __future__ import annotations

from typing import Protocol

import jax

from enginebay.ops.op import CLOSE, Op


class AllReduceOp(Protocol):
    """Inside shard_map over the mesh axes `axes`: returns the sum of all devices' x."""

    def __call__(self, x: jax.Array, *, axes: tuple[str, ...]) -> jax.Array: ...


class AllGatherOp(Protocol):
    """Inside shard_map over the mesh axes `axes`: concatenates all devices' x along `dim`."""

    def __call__(self, x: jax.Array, *, axes: tuple[str, ...], dim: int) -> jax.Array: ...


class AllToAllOp(Protocol):
    """Inside shard_map over the mesh axes `axes`: sends one piece of x to each device.

    The first axis of x is cut into one piece per device. Returns the pieces that this device
    receives, in the order of the devices.
    """

    def __call__(self, x: jax.Array, *, axes: tuple[str, ...]) -> jax.Array: ...


ALL_REDUCE: Op[AllReduceOp] = Op(
    "all_reduce",
    AllReduceOp,
    "enginebay_xla.collectives:all_reduce_reference",
    "enginebay_xla.quick_cases:all_reduce_cases",
    CLOSE,
    kit="enginebay_xla.kit.collectives:ALL_REDUCE",
)


ALL_GATHER: Op[AllGatherOp] = Op(
    "all_gather",
    AllGatherOp,
    "enginebay_xla.collectives:all_gather_reference",
    "enginebay_xla.quick_cases:all_gather_cases",
    {},
    kit="enginebay_xla.kit.collectives:ALL_GATHER",
)


ALL_TO_ALL: Op[AllToAllOp] = Op(
    "all_to_all",
    AllToAllOp,
    "enginebay_xla.collectives:all_to_all_reference",
    "enginebay_xla.quick_cases:all_to_all_cases",
    {},
    kit="enginebay_xla.kit.collectives:ALL_TO_ALL",
)
