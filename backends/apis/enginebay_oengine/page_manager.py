"""HBMPageManager: allocates the pages of a PagedAttentionCache, as single pages by number and as
leases for sequences, which share pages.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence

import numpy as np

from enginebay.contracts.cache import Lease
from enginebay.contracts.cache_shape import pages_for
from enginebay.errors import EnginebayError, InputError
from enginebay_oengine.paged_cache import PagedAttentionCacheMetaData
from enginebay_paged.lease_records import GroupPages
from enginebay_paged.ledger import PageLedger
from enginebay_paged.page_steps import POOL
from enginebay_paged.pool import DUMMY_PAGE, PagePool
from enginebay_paged.store import PageStore
from enginebay_runtime.rows import PageTable

ROWS_PER_PAGE = 4
"""Max leases per page, including leases that share all of their pages."""


class OutOfPagesError(EnginebayError, RuntimeError):
    """There are not enough pages, and waiting would not release any."""


class HBMPageManager:
    """The allocator of a cache's pages. Page 0 is the dummy page: it is never allocated, and
    freeing it has no effect.

    Callers allocate single pages by number (`alloc_hbm_pages`); the engine allocates leases for its
    sequences; both use one pool. A page number means the same page in every cache group of the
    model. Sequences keep all positions even in groups with a window, which therefore save no memory
    here. A free page counts once, independent of the number of groups. All methods are thread-safe.
    """

    def __init__(self, metadata: PagedAttentionCacheMetaData) -> None:
        self.metadata = metadata
        self.lock = threading.RLock()
        self.in_use = False
        """Whether an engine uses this manager; each engine needs its own."""
        self._rows = PagePool(ROWS_PER_PAGE * metadata.num_pages + 1)
        num_rows = self._rows.num_pages
        longest = max(metadata.max_length, metadata.page_size)
        self._pages = GroupPages(
            PageStore(PagePool(metadata.num_pages)),
            PageTable(num_rows, pages_for(longest, metadata.page_size), metadata.page_size),
        )
        self._ledger = PageLedger({POOL: self._pages}, num_rows, longest)
        self._single: dict[int, Lease] = {}
        self._unused: collections.deque[Lease] = collections.deque()

    @property
    def dummy_page_index(self) -> int:
        """The number of the dummy page."""
        return DUMMY_PAGE

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.metadata.page_size

    @property
    def num_free_pages(self) -> int:
        """Number of pages that can be allocated."""
        with self.lock:
            self._collect()
            return self._pages.store.available()

    @property
    def num_sequences(self) -> int:
        """Number of sequences that hold pages, in slots and as prefixes."""
        with self.lock:
            self._collect()
            return self._rows.num_used - len(self._single)

    def alloc_hbm_pages(self, num_pages: int) -> list[int]:
        """Allocate `num_pages` pages; [] when there are not enough. InputError for a negative
        number.
        """
        if num_pages < 0:
            raise InputError(f"{num_pages} pages", "0 or more", "Pass a number of pages.")
        with self.lock:
            if num_pages > self.num_free_pages:
                return []
            leases = [self.admit(self.page_size) for _ in range(num_pages)]
            taken = {lease.pages[POOL][0]: lease for lease in leases if lease is not None}
            if len(taken) < num_pages:
                for lease in taken.values():
                    self.release(lease)
                return []
            self._single |= taken
            return list(taken)

    def alloc_prefill_hbm_pages(self, prompt_length: int) -> list[int]:
        """Allocate pages for a prompt of `prompt_length` tokens; [] when there are not enough."""
        return self.alloc_hbm_pages(pages_for(prompt_length, self.page_size))

    def free_hbm_pages(self, pages: Sequence[int]) -> None:
        """Free pages of alloc_hbm_pages(). InputError if one of them is not allocated; then none is
        freed.
        """
        with self.lock:
            real = [int(page) for page in pages if page != DUMMY_PAGE]
            wrong = [page for page in real if page not in self._single]
            if wrong or len(set(real)) != len(real):
                raise InputError(
                    f"pages {wrong or real} to free",
                    "pages of alloc_hbm_pages(), once each",
                    "Pass the list that alloc_hbm_pages() returned, once.",
                )
            for page in real:
                self.release(self._single.pop(page))

    def admit(self, num_tokens: int) -> Lease | None:
        """Return a lease for a sequence of `num_tokens` tokens; None when there are not enough
        pages now.
        """
        with self.lock:
            self._collect()
            token = np.zeros(1, np.int32)
            return _with_row(self._rows, lambda row: self._ledger.admit(row, token, num_tokens))

    def fork(self, lease: Lease, num_tokens: int) -> Lease | None:
        """Return a lease of the first num_tokens tokens of another lease, which must be committed.

        It shares the full pages, and has a copy of the last partial page. None when there is no
        page for the copy, or no free row.
        """
        with self.lock:
            self._collect()
            fork = self._ledger.fork
            return _with_row(self._rows, lambda row: fork(lease, row, num_tokens, num_tokens))

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        """Extend a lease to `num_tokens` tokens; new tokens go to pages that no other lease holds.
        False when there are not enough pages now.
        """
        with self.lock:
            self._collect()
            return self._ledger.reserve(lease, num_tokens)

    def commit(self, lease: Lease, num_tokens: int) -> None:
        """Record that launched steps write `num_tokens` tokens of a lease to its pages."""
        with self.lock:
            self._ledger.commit(lease, np.broadcast_to(np.int32(0), num_tokens))

    def release(self, lease: Lease) -> None:
        """Release a lease."""
        with self.lock:
            self._ledger.release(lease)
            self._rows.drop(lease.row, keep=False)

    def release_later(self, leases: Sequence[Lease]) -> None:
        """Release leases at the next call of a method. Safe at any time, for example in a
        finalizer.
        """
        self._unused.extend(leases)

    def take_copies(self) -> Sequence[tuple[int, int]]:
        """Return pages (from, to) to copy before the next step. Each copy is returned once."""
        with self.lock:
            # Without prefix caching there are no moves but copies.
            return [(move.source, move.target) for move in self._ledger.take_moves()]

    def check(self) -> None:
        """Raise InternalError when the records are inconsistent."""
        with self.lock:
            self._collect()
            self._ledger.check()

    def _collect(self) -> None:
        while self._unused:
            lease = self._unused.popleft()
            if not lease.released:
                self.release(lease)


def _with_row(rows: PagePool, make: Callable[[int], Lease | None]) -> Lease | None:
    """The lease that `make` returns for a free row; None when it is None, or no row is free."""
    if not rows.num_free:
        return None
    row = rows.take()
    lease = make(row)
    if lease is None:
        rows.drop(row, keep=False)
    return lease
