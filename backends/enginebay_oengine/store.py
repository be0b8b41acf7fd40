"""PageStore: the pool and the prefix index as one: pages that are given out, shared, kept for
later, and evicted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from enginebay.errors import InternalError
from enginebay_oengine.pool import PagePool
from enginebay_oengine.prefix import PrefixIndex, Salt, page_digests


class PageStore:
    """Gives out pages, free ones first and then the cached one that was used least recently.

    A page that is in the index is cached when its last holder gives it back; without an index every
    page is freed.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        index: PrefixIndex | None = None,
        salt: Salt | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.index = index
        self._root = (salt or Salt()).digest()
        self._clock = clock

    def available(self, besides: Sequence[int] = ()) -> int:
        """How many pages can be taken, after the cached ones among `besides` were shared."""
        index = self.index
        woken = sum(map(index.is_resting, besides)) if index is not None else 0
        return self.pool.num_free + self.pool.num_cached - woken

    def find(self, token_ids: np.ndarray) -> list[tuple[bytes, int]]:
        """Hash and page of the longest run of full pages, from the first on, that hold token_ids
        int32 [tokens].

        Costs a microsecond a page, up to the first one that is not there.
        """
        found: list[tuple[bytes, int]] = []
        if self.index is None:
            return found
        for page in self.index.expire(self._clock()):
            self.pool.reclaim(page)
        for digest in page_digests(self._root, token_ids, self.page_size):
            known = self.index.find(digest)
            if known is None:
                break
            found.append((digest, known))
        return found

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

    def name(self, digests: list[bytes], pages: Sequence[int], token_ids: np.ndarray) -> None:
        """Put the full pages of token_ids into the index, and their hashes into `digests`, which
        has the first ones' already.
        """
        if self.index is None:
            return
        done = len(digests)
        parent = digests[-1] if digests else self._root
        for digest in page_digests(parent, token_ids[done * self.page_size :], self.page_size):
            self.index.add(digest, pages[len(digests)])
            digests.append(digest)

    def forget(self, salt: Salt | None = None) -> None:
        """Free what is cached, and find none of it again. With a salt, what is computed from now on
        depends on that.
        """
        if salt is not None:
            self._root = salt.digest()
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
