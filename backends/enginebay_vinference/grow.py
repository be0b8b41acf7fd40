"""Growing a contiguous cache: more slots and longer ones, what is in them kept."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from enginebay.cache import KVLayout
from enginebay.runner.resize import resize_cache
from enginebay.runner.runner import Runner


@dataclasses.dataclass(frozen=True)
class SlotShape:
    """A contiguous cache's size: slots, pages in each slot, tokens in each page."""

    num_slots: int
    pages_per_slot: int
    page_size: int

    @property
    def capacity(self) -> int:
        """Tokens of one slot."""
        return self.pages_per_slot * self.page_size

    def layout(self, like: KVLayout) -> KVLayout:
        """`like`, of this size."""
        return like.resized(
            num_pages=self.num_slots * self.pages_per_slot, page_size=self.page_size
        )


def grow_cache(runner: Runner, old: SlotShape, new: SlotShape) -> None:
    """Replace the runner's cache by one of size `new`."""
    layouts = {group: new.layout(layout) for group, layout in runner.layouts.items()}
    resize_cache(
        runner, layouts, lambda array, layout, _: _grow_array(array, old, new, layout.offset_axis)
    )


def _grow_array(array: jax.Array, old: SlotShape, new: SlotShape, offset_axis: int) -> jax.Array:
    """[slots * pages, ..., page_size at offset_axis, ...] padded with zeros to the new size."""
    if new.page_size != old.page_size:  # one page a slot, which gets longer
        padding = [(0, 0)] * array.ndim
        padding[0] = (0, new.num_slots - old.num_slots)
        padding[offset_axis] = (0, new.page_size - old.page_size)
        return jnp.pad(array, padding)
    slots = array.reshape(old.num_slots, old.pages_per_slot, *array.shape[1:])
    padding = [(0, new.num_slots - old.num_slots), (0, new.pages_per_slot - old.pages_per_slot)] + [
        (0, 0)
    ] * (array.ndim - 1)
    return jnp.pad(slots, padding).reshape(new.num_slots * new.pages_per_slot, *array.shape[1:])
