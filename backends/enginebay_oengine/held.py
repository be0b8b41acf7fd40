"""HeldPages: which row holds which pages, and the page table that steps are given."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from enginebay.cache import Lease
from enginebay.errors import InternalError
from enginebay.rows import PageTable
from enginebay_oengine.pool import PagePool


@dataclasses.dataclass(slots=True)
class Held:
    """What is known of a lease."""

    lease: Lease
    num_computed: int
    """Tokens whose keys and values are in the pages; those after them may be written."""
    digests: list[bytes]
    """Hashes of the first full pages."""


class HeldPages:
    """Every lease that was given and not taken back, by row; their pages are written to a page
    table.
    """

    def __init__(self, table: PageTable) -> None:
        self.page_size = table.page_size
        self._held: dict[int, Held] = {}
        self._table = table

    def __contains__(self, row: int) -> bool:
        return row in self._held

    def current(self, lease: Lease) -> Held:
        """What is known of a lease. InternalError when it was taken back."""
        held = self._held.get(lease.row)
        if held is None or held.lease is not lease:
            raise InternalError(
                f"a lease of row {lease.row} is used or released after it was released"
            )
        return held

    def add(self, row: int, num_cached: int, digests: list[bytes], pages: Sequence[int]) -> Lease:
        """A lease of these pages, of which the first hold `num_cached` tokens."""
        lease = Lease(row=row, capacity=0, num_cached=num_cached)
        self._held[row] = Held(lease, num_cached, digests)
        self.add_pages(lease, pages)
        return lease

    def add_pages(self, lease: Lease, pages: Sequence[int]) -> None:
        """Give a lease more pages."""
        self._table.append(lease.row, pages)
        lease.pages = (*lease.pages, *pages)
        lease.capacity = len(lease.pages) * self.page_size

    def remove(self, lease: Lease) -> None:
        """Take a lease back."""
        self.current(lease)
        lease.released = True
        del self._held[lease.row]
        self._table.reset(lease.row)

    def write_table(self, leases: Sequence[Lease], table: np.ndarray) -> None:
        """Fill int32 [rows, pages] with the pages of leases, cut where they have more than there
        are columns.
        """
        table[:] = 0
        width = min(table.shape[1], self._table.max_pages_per_req)
        table[: len(leases), :width] = self._table.page_ids[[lease.row for lease in leases], :width]

    def check(self, pool: PagePool) -> None:
        """InternalError when the books of a row are wrong, or the pool's do not fit them."""
        holders = collections.Counter(
            page for held in self._held.values() for page in held.lease.pages
        )
        digests: dict[int, bytes] = {}
        for row, held in self._held.items():
            self._check_row(row, held)
            for page, digest in zip(held.lease.pages, held.digests, strict=False):
                if digests.setdefault(page, digest) != digest:
                    raise InternalError(f"page {page} is shared by rows whose tokens differ")
        for page in range(pool.num_pages):
            if pool.holders(page) != holders[page]:
                raise InternalError(
                    f"page {page} is held {pool.holders(page)} times by count, "
                    f"and by {holders[page]} leases"
                )

    def _check_row(self, row: int, held: Held) -> None:
        lease, table = held.lease, self._table.page_ids[row]
        num_pages = len(lease.pages)
        right = (
            lease.row == row
            and not lease.released
            and lease.capacity == num_pages * self.page_size
            and len(set(lease.pages)) == num_pages
            and self._table.num_pages[row] == num_pages
            and tuple(table[:num_pages]) == lease.pages
            and not table[num_pages:].any()
            and len(held.digests) * self.page_size <= held.num_computed <= lease.capacity
        )
        if not right:
            raise InternalError(f"the ledger's books are wrong at row {row}: {held}")
