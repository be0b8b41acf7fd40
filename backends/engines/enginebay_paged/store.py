"""PageStore: the page pool and the prefix index of one cache group."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from enginebay.errors import InternalError
from enginebay_paged.host_tier import HostTier
from enginebay_paged.pool import PagePool
from enginebay_paged.prefix import PrefixIndex


class PageStore:
    """Allocates pages: free pages first, then cached pages in the order of `RestingPages`.

    A page in the index is cached when its last holder drops it. Without an index every page becomes
    free. With a host tier, a cached page whose space is needed is moved to the host.
    """

    def __init__(
        self,
        pool: PagePool,
        index: PrefixIndex | None = None,
        clock: Callable[[], float] = time.monotonic,
        host: HostTier | None = None,
    ) -> None:
        self.pool = pool
        self.index = index
        self.host = host
        self._clock = clock

    def available(self, besides: Collection[int] = ()) -> int:
        """Return the number of pages that can be taken, after sharing the cached pages among
        `besides`.
        """
        index = self.index
        woken = sum(map(index.is_resting, besides)) if besides and index is not None else 0
        return self.pool.num_takeable - woken

    def expire(self, *, idle: bool = False) -> float | None:
        """Free the pages that have rested for the index's ttl_s, or with `idle` for its idle_s.
        Returns the seconds until the next one will have rested for idle_s, None without `idle`,
        without such a limit and when no page rests.
        """
        index, due_s = self.index, None
        if index is not None:
            now_s = self._clock()
            gone = index.expire(now_s)
            if idle and index.idle_s is not None:
                gone += index.expire(now_s, index.idle_s)
                due_s = index.next_expiry_s(now_s, index.idle_s)
            for page in gone:
                self.pool.reclaim(page)
        if self.host is not None:
            self.host.expire()
        return due_s

    def find(self, digest: bytes) -> int | None:
        """Return the page whose tokens have this hash, or None."""
        return None if self.index is None else self.index.find(digest)

    def holds(self, digest: bytes, *, recall: bool = False) -> bool:
        """Return whether the page with this hash is on the device or the host. `recall`: read the
        page from a file if it is on neither; the host keeps it until `HostTier.settle`.
        """
        if self.host is None:
            return self.find(digest) is not None
        if recall:
            self.host.need(digest)
        if self.find(digest) is not None or self.host.holds(digest):
            return True
        return recall and self.host.recall(digest)

    def name(self, digest: bytes, page: int) -> None:
        """Add a page with a holder to the index, under the hash of its tokens."""
        if self.index is not None:
            self.index.add(digest, page)

    def take(self) -> int:
        """Take a page with no other holder, which is not in the index."""
        if not self.pool.num_free and self.index is not None:
            self.evict(self.index)
        return self.pool.take()

    def evict(self, index: PrefixIndex, *, at_end: bool = False) -> None:
        """Free the cached page that was not used for longest; the host tier gets its content.
        `at_end`: the page that was used last, which the host tier saves again if it has it.
        """
        gone = index.evict(latest=at_end)
        self.pool.reclaim(gone.page)
        if self.host is not None:
            self.host.save(gone, again=at_end)

    def share(self, page: int) -> None:
        """Add a holder to a page."""
        if self.index is not None:
            self.index.wake(page)
        self.pool.share(page)

    def drop(self, page: int, *, is_passed: bool = False) -> None:
        """Remove a holder of a page. `is_passed`: the row goes on without it."""
        keep = self.index is not None and page in self.index
        if self.pool.drop(page, keep=keep) and self.index is not None and keep:
            self.index.rest(page, self._clock(), is_passed=is_passed)

    def is_private(self, page: int) -> bool:
        """Return whether the page's holder may write to it: it has no other holder, and is not in
        the index.
        """
        return self.pool.holders(page) == 1 and (self.index is None or page not in self.index)

    def forget(self) -> None:
        """Free the cached pages, and clear the index."""
        if self.index is not None:
            for page in self.index.clear():
                self.pool.reclaim(page)
        if self.host is not None:
            self.host.forget()

    def check(self) -> None:
        """Raise InternalError when the pool and the index do not agree."""
        self.pool.check()
        if self.host is not None:
            self.host.check()
        if self.index is None:
            if self.pool.num_cached:
                raise InternalError("a page is cached without a prefix index")
            return
        self.index.check()
        if self.index.num_resting != self.pool.num_cached:
            raise InternalError(
                f"{self.pool.num_cached} pages are cached, "
                f"and {self.index.num_resting} can be evicted"
            )
