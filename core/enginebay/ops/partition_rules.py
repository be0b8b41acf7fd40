"""Partition rules: how calls of an op are split over devices. The record of an op names its rule,
and `enginebay.compose.partition` applies it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import tree_util

from enginebay.weights import Weight


@dataclasses.dataclass(frozen=True)
class Partition:
    """How one call of an op is split over devices.

    inputs, outputs: the names of the dimensions of each array, such as "rows features"; dimensions
    with the same name are split in the same way. A dimension of a NamedWeight is split like the
    axis of the weight. A dimension with the name of a logical axis ("vocab", "kv_heads") is split
    over the mesh axis of this logical axis, if its size divides evenly in all arrays. If no
    dimension is split, XLA's compiler handles the call.

    run: a function (shards, *arrays) that runs inside shard_map and computes one device's part of
    the results. The arrays are the device's parts of the arguments that are not None, then of the
    keywords in `keywords`; the keyword `batch` becomes two arrays, its rows and its positions.
    reduced: the names of dimensions over which `shards.reduce` combines the parts. reduction: the
    name of the collective op that `shards.reduce` calls.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    run: Callable[..., Any]
    reduced: tuple[str, ...] = ()
    reduction: str = "all_reduce"
    keywords: tuple[str, ...] = ()
    size: int | None = None
    """Number of entries to keep of each result's first axis, if `run` pads it to divide evenly."""


@dataclasses.dataclass(frozen=True)
class Shards:
    """The devices over which a call of an op reduces: their mesh axes (none if no reduced dimension
    is split), their number, and the collective op of the partition rule.
    """

    axes: tuple[str, ...]
    count: int
    collective: Callable[..., jax.Array]

    def reduce(self, x: jax.Array, **keywords: Any) -> jax.Array:
        """Call the collective op over these devices; return x itself for a single device."""
        return self.collective(x, axes=self.axes, **keywords) if self.axes else x

    @property
    def index(self) -> jax.Array:
        """The index of this device among them."""
        return jax.lax.axis_index(self.axes)


@functools.partial(tree_util.register_dataclass, data_fields=["weight"], meta_fields=["axes"])
@dataclasses.dataclass(frozen=True)
class NamedWeight:
    """A weight with the logical axis of each dimension. A model that is split over devices passes
    it to ops; the op then calls the implementation with the plain weight.
    """

    weight: Weight
    axes: tuple[str | None, ...]
