"""Recurrent states: the groups that a model declares, and the memory layout of their arrays."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheLayout
from enginebay.contracts.cache_shape import CacheShape


@dataclasses.dataclass(frozen=True, slots=True)
class StateArray:
    """One array that a layer keeps for each row: its shape and dtype, and the logical axis of each
    dimension (None: never sharded).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class StateGroup:
    """Layers of a model that keep a recurrent state for each row, instead of keys and values.

    A row's state occupies one page of the group, its *place*, however many tokens the row has. The
    state is that after the last token: earlier states are gone, and no token may be applied twice.
    At position 0 the state counts as zeros, whatever the place contains.
    """

    name: str
    num_layers: int
    arrays: tuple[StateArray, ...]

    def make_layout(self, shape: CacheShape) -> StateLayout:
        """Return the layout of a pool of this size."""
        return StateLayout(shape.num_pages, shape.page_size, self.arrays)


@dataclasses.dataclass(frozen=True)
class StateLayout(CacheLayout):
    """The layout of a group with a recurrent state: arrays [places, *shape]. `page_size` is the max
    number of tokens of a row, so that page tables have one column.
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
