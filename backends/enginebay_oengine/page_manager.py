"""HBMPageManager: who holds which pages of a PagedAttentionCache: single pages by number, and
sequences that share them.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence

import numpy as np

from enginebay.cache import Lease
from enginebay.cache_shape import pages_for
from enginebay.errors import EnginebayError, InputError
from enginebay.rows import PageTable
from enginebay_oengine.held import GroupPages
from enginebay_oengine.ledger import PageLedger
from enginebay_oengine.paged_cache import PagedAttentionCacheMetaData
from enginebay_oengine.pool import DUMMY_PAGE, PagePool
from enginebay_oengine.store import PageStore

POOL = "pages"
"""What the books call the one pool: a page that callers take by number is a page of every cache
group of the model.
"""

ROWS_PER_PAGE = 4
"""How many leases there may be for each page: whole ones, and others that share all of theirs."""


class OutOfPagesError(EnginebayError, RuntimeError):
    """There are not enough pages, and nothing that would make some free by itself."""


class HBMPageManager:
    """The books of a cache. Page 0 is the dummy: it is never given out, and giving it back is
    ignored.

    Callers take pages by number (`alloc_hbm_pages`), the engine takes leases for its sequences;
    both are of one pool. A page is that of its number in every cache group of the model: each group
    has as many pages, and sequences keep all positions in groups with a window too, which saves no
    memory here. A free page counts once, whatever the number of groups. Methods may be called from
    several threads.
    """

    def __init__(self, metadata: PagedAttentionCacheMetaData) -> None:
        self.metadata = metadata
        self.lock = threading.RLock()
        self.in_use = False
        """Whether an engine keeps its pages in these books: each needs its own."""
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
        """The page that stands for no page."""
        return DUMMY_PAGE

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.metadata.page_size

    @property
    def num_free_pages(self) -> int:
        """Pages that can be given out."""
        with self.lock:
            self._collect()
            return self._pages.store.available()

    @property
    def num_sequences(self) -> int:
        """Sequences that hold pages: those in slots, and of prefixes that somebody refers to."""
        with self.lock:
            self._collect()
            return self._rows.num_used - len(self._single)

    def alloc_hbm_pages(self, num_pages: int) -> list[int]:
        """So many pages, or [] when there are not as many. InputError for a count below 0."""
        if num_pages < 0:
            raise InputError(f"{num_pages} pages", "0 or more", "Correct the count.")
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
        """Pages for a prompt of so many tokens, or [] when there are not enough."""
        return self.alloc_hbm_pages(pages_for(prompt_length, self.page_size))

    def free_hbm_pages(self, pages: Sequence[int]) -> None:
        """Give pages of alloc_hbm_pages back. InputError for one that was not given out so; then
        none is taken back.
        """
        with self.lock:
            real = [int(page) for page in pages if page != DUMMY_PAGE]
            wrong = [page for page in real if page not in self._single]
            if wrong or len(set(real)) != len(real):
                raise InputError(
                    f"pages {wrong or real} to free",
                    "pages that alloc_hbm_pages gave, once each",
                    "Keep its list, and free it once.",
                )
            for page in real:
                self.release(self._single.pop(page))

    def admit(self, num_tokens: int) -> Lease | None:
        """A lease for a sequence of so many tokens, or None when there are not enough pages now."""
        return self._with_row(
            lambda row: self._ledger.admit(row, np.zeros(1, np.int32), num_tokens)
        )

    def fork(self, lease: Lease, num_tokens: int) -> Lease | None:
        """A lease of another one's first num_tokens tokens, which must be committed.

        It shares their full pages, and has a copy of the page that it goes on in. None when there
        is no page for the copy, or there are as many leases as there may be.
        """
        return self._with_row(lambda row: self._ledger.fork(lease, row, num_tokens, num_tokens))

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        """Make room for so many tokens, of which those to come are the lease's alone; False when
        there are no pages now.
        """
        with self.lock:
            self._collect()
            return self._ledger.reserve(lease, num_tokens)

    def commit(self, lease: Lease, num_tokens: int) -> None:
        """Take note that launched steps put so many tokens of a lease into its pages."""
        with self.lock:
            self._ledger.commit(lease, np.broadcast_to(np.int32(0), num_tokens))

    def release(self, lease: Lease) -> None:
        """Take a lease back."""
        with self.lock:
            self._ledger.release(lease)
            self._rows.drop(lease.row, keep=False)

    def release_later(self, leases: Sequence[Lease]) -> None:
        """Take leases back with the next call. Safe at any moment, as of a finalizer."""
        self._unused.extend(leases)

    def take_copies(self) -> Sequence[tuple[int, int]]:
        """Pages (from, to) to be copied before the next step; they are told once."""
        with self.lock:
            return self._ledger.take_copies().get(POOL, ())

    def check(self) -> None:
        """InternalError when the books do not add up."""
        with self.lock:
            self._collect()
            self._ledger.check()

    def _with_row(self, make: Callable[[int], Lease | None]) -> Lease | None:
        """The lease that `make` returns for a free row; None when it returns None, or all rows are
        taken.
        """
        with self.lock:
            self._collect()
            if not self._rows.num_free:
                return None
            row = self._rows.take()
            lease = make(row)
            if lease is None:
                self._rows.drop(row, keep=False)
            return lease

    def _collect(self) -> None:
        while self._unused:
            lease = self._unused.popleft()
            if not lease.released:
                self.release(lease)
