"""SlotSizes: the sizes of a cache in which every row owns a slot, and their growth."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from enginebay.contracts.cache import Lease, Ledger
from enginebay.contracts.cache_shape import CacheShape, pages_for
from enginebay.contracts.engine import Demand
from enginebay.contracts.executor import EngineParts
from enginebay_runtime.buckets import bucket_sizes, smallest_fit
from enginebay_runtime.geometry import CacheSizes, Geometry, Shapes

ONE_PAGE_LAYOUTS = ("hnd",)
"""Layouts in which a slot is one page: their kernels accept pages of any size."""


@dataclasses.dataclass(frozen=True)
class SlotSizes(CacheSizes):
    """Sizes of a cache with one slot per row. The cache grows to more slots and to longer slots, in
    the sizes of the buckets. In the groups `states`, which have a recurrent state, a slot is one
    page of the full length.
    """

    groups: tuple[str, ...] = ()
    states: tuple[str, ...] = ()

    def shapes_of(self, shape: CacheShape) -> dict[str, CacheShape]:
        """Return the shapes of all groups; `shape` is the shape of slots of keys and values."""
        place = CacheShape(shape.num_slots, 1, self.steps.kv_lens[-1])
        return {**dict.fromkeys(self.groups, shape), **dict.fromkeys(self.states, place)}

    def geometry(self, shapes: Shapes) -> Geometry:
        shape = next(iter(shapes.values()))
        return Geometry(
            self.steps,
            shape.page_size,
            shape.capacity,
            self.compact_decode,
            self.num_drafts,
            shape.num_slots,
        )

    def wanted(
        self, shapes: Shapes, leases: Sequence[Lease], demand: Demand, ledger: Ledger
    ) -> Shapes:
        if shapes == self.whole:
            return shapes
        (now, whole) = (next(iter(each.values())) for each in (shapes, self.whole))
        num_rows = max(
            max(lease.row for lease in leases) + 1, min(demand.num_rows, whole.num_slots)
        )
        num_tokens = max(demand.num_tokens_per_row, *(lease.capacity for lease in leases))
        longest = self.steps.kv_lens[-1]
        shape = slot_shape(
            smallest_fit(self.steps.decode_rows, max(num_rows, now.num_slots)),
            smallest_fit(self.steps.kv_lens, min(max(num_tokens, now.capacity), longest)),
            self.page_size,
        )
        return self.shapes_of(shape)


def slot_shape(num_slots: int, capacity: int, page_size: int) -> CacheShape:
    """Return the shape of `num_slots` slots of at least `capacity` tokens, in pages of at most
    `page_size` tokens.
    """
    page_size = min(page_size, capacity)
    return CacheShape(num_slots, pages_for(capacity, page_size), page_size)


def slot_sizes(parts: EngineParts, page_size: int, *, grow: bool = True) -> SlotSizes:
    """Return the sizes of a cache of slots. With `grow` the first size holds one short request."""
    steps = bucket_sizes(parts)
    if parts.layout in ONE_PAGE_LAYOUTS:
        page_size = steps.kv_lens[-1]
    whole = slot_shape(steps.decode_rows[-1], steps.kv_lens[-1], page_size)
    first = slot_shape(steps.decode_rows[0], steps.kv_lens[0], page_size) if grow else whole
    sizes = SlotSizes(
        steps=steps,
        page_size=page_size,
        compact_decode=parts.compact_decode,
        num_drafts=parts.config.max_drafts,
        first={},
        whole={},
        groups=tuple(group.name for group in parts.info.groups),
        states=tuple(group.name for group in parts.info.states),
    )
    return dataclasses.replace(sizes, first=sizes.shapes_of(first), whole=sizes.shapes_of(whole))
