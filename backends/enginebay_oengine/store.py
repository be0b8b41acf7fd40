"""PageStore: the pool and the prefix index of one cache group as one: pages that are given out,
shared, kept for later, and evicted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from enginebay.errors import InternalError
from enginebay_oengine.pool import PagePool
from enginebay_oengine.prefix import PrefixIndex


class PageStore:
    """Gives out pages, free ones first and then the cached one that was used least recently.

    A page that is in the index is cached when its last holder gives it back; without an index every
    page is freed.
    """

    def __init__(
        self,
        pool: PagePool,
        index: PrefixIndex | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.index = index
        self._clock = clock

    def available(self, besides: Iterable[int] = ()) -> int:
        """How many pages can be taken, after the cached ones among `besides` were shared."""
        index = self.index
        woken = sum(map(index.is_resting, besides)) if index is not None else 0
        return self.pool.num_free + self.pool.num_cached - woken

    def expire(self) -> None:
        """Free the pages that have rested too long."""
        if self.index is not None:
            for page in self.index.expire(self._clock()):
                self.pool.reclaim(page)

    def find(self, digest: bytes) -> int | None:
        """The page whose tokens have this hash."""
        return None if self.index is None else self.index.find(digest)

    def name(self, digest: bytes, page: int) -> None:
        """Put a page that somebody holds into the index, under the hash of its tokens."""
        if self.index is not None:
            self.index.add(digest, page)

    def take(self) -> int:
        """A page that nobody else holds and that is not in the index."""
        if not self.pool.num_free and self.index is not None:
            self.pool.reclaim(self.index.evict())
        return self.pool.take()

    def share(self, page: int) -> None:
        """One more holds a page that was found or is held."""
        if self.index is not None and self.index.is_resting(page):
            self.index.wake(page)
        self.pool.share(page)

    def drop(self, page: int) -> None:
        """One fewer holds a page."""
        keep = self.index is not None and page in self.index
        if self.pool.drop(page, keep=keep) and self.index is not None and keep:
            self.index.rest(page, self._clock())

    def is_private(self, page: int) -> bool:
        """Whether the one who holds a page may write to it: nobody else does, or will find it."""
        return self.pool.holders(page) == 1 and (self.index is None or page not in self.index)

    def forget(self) -> None:
        """Free what is cached, and find none of it again."""
        if self.index is not None:
            for page in self.index.clear():
                self.pool.reclaim(page)

    def check(self) -> None:
        """InternalError when the books of pool and index are wrong."""
        self.pool.check()
        if self.index is None:
            if self.pool.num_cached:
                raise InternalError("a page is cached, and there is no prefix index")
            return
        self.index.check()
        if self.index.num_resting != self.pool.num_cached:
            raise InternalError(
                f"{self.pool.num_cached} pages are cached, "
                f"and {self.index.num_resting} can be evicted"
            )
