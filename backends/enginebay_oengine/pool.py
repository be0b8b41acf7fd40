"""PagePool: which pages of the cache are in use, kept for later, or free; reference counts and a
free list.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from enginebay.errors import InternalError

DUMMY_PAGE = 0
"""The page that no row owns: unused entries of page tables point to it."""


class PagePool:
    """The pages 1 to num_pages - 1 of a cache; page 0 is the dummy. Every operation is O(1).

    A page is *used* while somebody holds it, *cached* when nobody does and its contents are kept,
    and *free* otherwise. A pool takes memory for the pages that were ever taken, so a pool of any
    size is made at once.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise InternalError(f"a pool of {num_pages} pages: the dummy and at least one more")
        self.num_pages = num_pages
        self._holders = array("i", [0])  # of the first `reach` pages
        self._freed = array("q")  # free pages below `reach`; those from `reach` on were never taken
        self._cached: set[int] = set()

    @property
    def num_usable(self) -> int:
        """Pages besides the dummy."""
        return self.num_pages - 1

    @property
    def reach(self) -> int:
        """How many of the first pages hold all that was ever taken, the dummy included: lower ones
        are taken before higher ones.
        """
        return len(self._holders)

    @property
    def num_free(self) -> int:
        """Pages with nothing in them."""
        return len(self._freed) + self.num_pages - self.reach

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds and whose contents are kept."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages that somebody holds."""
        return self.num_usable - self.num_free - len(self._cached)

    def holders(self, page: int) -> int:
        """How many hold a page."""
        return self._holders[page] if page < self.reach else 0

    def take(self) -> int:
        """A free page, held once from now on. InternalError when there is none."""
        if self._freed:
            page = self._freed.pop()
            self._holders[page] = 1
            return page
        if self.reach == self.num_pages:
            raise InternalError("a page is taken from a pool that has none free")
        self._holders.append(1)
        return self.reach - 1

    def share(self, page: int) -> None:
        """One more holds a used or cached page."""
        if not self.holders(page):
            if page not in self._cached:
                raise InternalError(f"page {page} is shared, and it is free")
            self._cached.remove(page)
        self._holders[page] += 1

    def drop(self, page: int, *, keep: bool) -> bool:
        """One fewer holds a page; whether nobody does now. Then it is cached with `keep`, and free
        without.
        """
        if not self.holders(page):
            raise InternalError(f"page {page} is given back by somebody who does not hold it")
        self._holders[page] -= 1
        if self._holders[page]:
            return False
        if keep:
            self._cached.add(page)
        else:
            self._freed.append(page)
        return True

    def reclaim(self, page: int) -> None:
        """Make a cached page free."""
        if page not in self._cached:
            raise InternalError(f"page {page} is reclaimed, and it is not cached")
        self._cached.remove(page)
        self._freed.append(page)

    def check(self) -> None:
        """InternalError unless every page that was ever taken is exactly one of used, cached and
        free.
        """
        check_books(self._holders, self._freed, self._cached)


def check_books(holders: Sequence[int], free_list: Sequence[int], cached: AbstractSet[int]) -> None:
    """InternalError unless every page but the dummy is exactly one of used, cached and free.

    `holders` says how many hold each page.
    """
    free = set(free_list)
    if len(free) != len(free_list):
        raise InternalError("a page is twice in the free list")
    held = {page for page, count in enumerate(holders) if count}
    if min(holders) < 0 or DUMMY_PAGE in held | free | cached:
        raise InternalError("a page is held less than never, or the dummy page is given out")
    if len(held) + len(free) + len(cached) != len(held | free | cached):
        raise InternalError("a page is two of used, cached and free")
    if len(held | free | cached) != len(holders) - 1:
        raise InternalError("a page is none of used, cached and free")
