"""CacheShape: the size of a cache group's arrays."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class CacheShape:
    """The size of a cache group's arrays: pages in `num_slots` runs of equal length, one for each
    row where rows own theirs, and one for all where they share a pool; tokens of a page.
    """

    num_slots: int
    pages_per_slot: int
    page_size: int

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return self.num_slots * self.pages_per_slot

    @property
    def capacity(self) -> int:
        """Tokens of one slot."""
        return self.pages_per_slot * self.page_size


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold so many tokens."""
    return -(-num_tokens // page_size)
