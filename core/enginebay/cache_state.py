"""Recurrent states: the groups of them that a model declares, and how their arrays lie in
memory.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from enginebay.cache import CacheLayout
from enginebay.cache_shape import CacheShape


@dataclasses.dataclass(frozen=True, slots=True)
class StateArray:
    """One array that a layer keeps of each row: its shape and dtype, and the logical axis of each
    dimension (None: never sharded).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class StateGroup:
    """Layers of a model that keep a recurrent state of each row, in place of keys and values.

    A row's state is one page of the group, a *place*, however many tokens the row has. It exists at
    one length only, and no token may be applied to it twice. A row at position 0 has a state of
    zeros, whatever its place holds.
    """

    name: str
    num_layers: int
    arrays: tuple[StateArray, ...]

    def make_layout(self, shape: CacheShape) -> StateLayout:
        """The layout of a pool of this size."""
        return StateLayout(shape.num_pages, shape.page_size, self.arrays)


@dataclasses.dataclass(frozen=True)
class StateLayout(CacheLayout):
    """Arrays [places, *shape]. `page_size` is the most tokens of a row: page tables have one
    column.
    """

    arrays: tuple[StateArray, ...]

    @property
    def name(self) -> str:
        return "state"

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            one.name: jax.ShapeDtypeStruct((self.num_pages, *one.shape), jnp.dtype(one.dtype))
            for one in self.arrays
        }

    def logical_axes(self) -> dict[str, tuple[str | None, ...]]:
        return {one.name: (None, *one.axes) for one in self.arrays}
