"""CacheShape: the size of a cache group's arrays."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class CacheShape:
    """The size of a cache group's arrays: `num_slots` runs of `pages_per_slot` pages of `page_size`
    tokens. A cache in which every row owns its pages has one slot for each row; a pool that all
    rows share is one slot.
    """

    num_slots: int
    pages_per_slot: int
    page_size: int

    @property
    def num_pages(self) -> int:
        """Total number of pages."""
        return self.num_slots * self.pages_per_slot

    @property
    def capacity(self) -> int:
        """Number of tokens that fit one slot."""
        return self.pages_per_slot * self.page_size


def pages_for(num_tokens: int, page_size: int) -> int:
    """Return the number of pages that `num_tokens` tokens need."""
    return -(-num_tokens // page_size)
