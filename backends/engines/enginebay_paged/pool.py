"""PagePool: tracks which pages of a cache are used, cached or free, with reference counts and a
free list.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from enginebay.errors import InternalError

DUMMY_PAGE = 0
"""The page that no row owns; unused entries of page tables are set to it."""


class PagePool:
    """The pages 1 to num_pages - 1 of a cache; page 0 is the dummy page. Every operation is O(1).

    A page is *used* while it has holders, *cached* when it has none but its contents are kept, and
    *free* otherwise. The pool's own memory grows with the highest page that was taken, so a pool of
    any size is created at once.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise InternalError(f"a pool of {num_pages} pages: the dummy and at least one more")
        self.num_pages = num_pages
        self._holders = array("i", [0])  # number of holders of each page below `reach`
        self._freed = array("q")  # free pages below `reach`; pages from `reach` on were never taken
        self._cached: set[int] = set()
        self._stale: set[int] = set()  # pages that became free since take_stale()

    @property
    def num_usable(self) -> int:
        """Number of pages without the dummy page."""
        return self.num_pages - 1

    @property
    def reach(self) -> int:
        """The highest page that was ever taken, plus one. Lower pages are taken first."""
        return len(self._holders)

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._freed) + self.num_pages - len(self._holders)

    @property
    def num_takeable(self) -> int:
        """Number of pages without a holder: free pages, and cached pages, which can be evicted."""
        return len(self._freed) + self.num_pages - len(self._holders) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Number of cached pages, which have no holder."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Number of pages with a holder."""
        return self.num_usable - self.num_free - len(self._cached)

    def holders(self, page: int) -> int:
        """Return the number of holders of a page."""
        return self._holders[page] if page < len(self._holders) else 0

    def all_holders(self) -> np.ndarray:
        """Return the number of holders of each page below `reach`, int32; -1 for cached pages."""
        found = np.array(self._holders, np.int32)
        found[list(self._cached)] = -1
        return found

    def take(self) -> int:
        """Take a free page, with one holder. InternalError when none is free."""
        if self._freed:
            page = self._freed.pop()
            self._holders[page] = 1
            return page
        page = len(self._holders)
        if page == self.num_pages:
            raise InternalError("take() of a pool without a free page")
        self._holders.append(1)
        return page

    def share(self, page: int) -> None:
        """Add a holder to a used or cached page."""
        if not self.holders(page):
            if page not in self._cached:
                raise InternalError(f"share() of page {page}, which is free")
            self._cached.remove(page)
        self._holders[page] += 1

    def drop(self, page: int, *, keep: bool) -> bool:
        """Remove a holder of a page. Returns whether it was the last one; the page is then cached
        with `keep`, and free without.
        """
        if not self.holders(page):
            raise InternalError(f"drop() of page {page}, which has no holder")
        self._holders[page] -= 1
        if self._holders[page]:
            return False
        if keep:
            self._cached.add(page)
        else:
            self._freed.append(page)
            self._stale.add(page)
        return True

    def reclaim(self, page: int) -> None:
        """Make a cached page free."""
        if page not in self._cached:
            raise InternalError(f"reclaim() of page {page}, which is not cached")
        self._cached.remove(page)
        self._freed.append(page)
        self._stale.add(page)

    def take_stale(self) -> np.ndarray:
        """Return the free pages that were in use since they were returned last, int32."""
        stale = [page for page in self._stale - self._cached if not self._holders[page]]
        self._stale.clear()
        return np.asarray(stale, np.int32)

    def check(self) -> None:
        """Raise InternalError unless every page that was ever taken is exactly one of used, cached
        and free.
        """
        check_pages(self._holders, self._freed, self._cached)


def check_pages(holders: Sequence[int], free_list: Sequence[int], cached: AbstractSet[int]) -> None:
    """Raise InternalError unless every page except the dummy page is exactly one of used, cached
    and free.

    `holders`: number of holders of each page.
    """
    free = set(free_list)
    if len(free) != len(free_list):
        raise InternalError("a page is in the free list twice")
    held = {page for page, count in enumerate(holders) if count}
    if min(holders) < 0 or DUMMY_PAGE in held | free | cached:
        raise InternalError("a page has a negative number of holders, or the dummy page is taken")
    if len(held) + len(free) + len(cached) != len(held | free | cached):
        raise InternalError("a page is more than one of used, cached and free")
    if len(held | free | cached) != len(holders) - 1:
        raise InternalError("a page is none of used, cached and free")
