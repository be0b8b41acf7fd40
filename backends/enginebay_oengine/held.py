"""HeldPages: which row holds which pages of each cache group, and the page tables that steps are
given.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from enginebay.cache import Lease
from enginebay.cache_shape import pages_for
from enginebay.errors import InternalError
from enginebay.prefix_key import NO_KEY, PrefixKey
from enginebay.rows import PageTable
from enginebay_oengine.pool import DUMMY_PAGE
from enginebay_oengine.store import PageStore


@dataclasses.dataclass(frozen=True, eq=False)
class GroupPages:
    """The pages of one cache group: those that there are, and the table of those of each row.

    `window`: a row keeps the pages of its last `window` positions, and gives the others back. None:
    it keeps all. A group with a window has room for all rows.
    """

    store: PageStore
    table: PageTable
    window: int | None = None

    def first_page(self, num_tokens: int) -> int:
        """The first page that a row needs which goes on after `num_tokens` tokens."""
        if self.window is None:
            return 0
        return max(0, num_tokens + 1 - self.window) // self.table.page_size


@dataclasses.dataclass(slots=True)
class Held:
    """What is known of a lease."""

    lease: Lease
    num_computed: int
    """Tokens whose keys and values are in the pages; those after them may be written."""
    digests: list[bytes]
    """Hashes of the first full pages."""
    key: PrefixKey
    """What these hashes depend on besides the tokens."""
    cut: int | None = None
    """After how many tokens the states of the row are to be kept."""
    is_forked: bool = False
    """Whether others may fork the row there."""
    fork_point: tuple[int, bytes] | None = None
    """Tokens after which its states were kept for forks, and the hash of these tokens."""


class HeldPages:
    """Every lease that was given and not taken back, by row."""

    def __init__(self, groups: Mapping[str, GroupPages], max_ahead: int | None = None) -> None:
        """`max_ahead`: how many tokens after the computed ones a group with a window has
        pages for.
        """
        self.groups = groups
        self._max_ahead = max_ahead
        self._sliding = [name for name, group in groups.items() if group.window is not None]
        self._held: dict[int, Held] = {}

    def __contains__(self, row: int) -> bool:
        return row in self._held

    def __len__(self) -> int:
        return len(self._held)

    def current(self, lease: Lease) -> Held:
        """What is known of a lease. InternalError when it was taken back."""
        held = self._held.get(lease.row)
        if held is None or held.lease is not lease:
            raise InternalError(
                f"a lease of row {lease.row} is used or released after it was released"
            )
        return held

    def add(
        self,
        row: int,
        num_cached: int,
        digests: list[bytes],
        pages: Mapping[str, Sequence[int]],
        key: PrefixKey = NO_KEY,
    ) -> Held:
        """A lease of these pages by group, of which the first hold `num_cached` tokens."""
        lease = Lease(row=row, capacity=0, num_cached=num_cached, pages=dict.fromkeys(pages, ()))
        held = self._held[row] = Held(lease, num_cached, digests, key)
        for group, its_pages in pages.items():
            self.extend(lease, group, its_pages)
        return held

    def extend(self, lease: Lease, group: str, pages: Sequence[int]) -> None:
        """Give a lease more pages of a group."""
        self.groups[group].table.append(lease.row, pages)
        lease.pages[group] = (*lease.pages[group], *pages)

    def last_page(self, group: str, num_computed: int, num_tokens: int) -> int:
        """How many pages of a group a row of `num_tokens` has, or has given back, when
        `num_computed` of them are computed.
        """
        one = self.groups[group]
        if one.window is not None:
            assert self._max_ahead is not None, "a group with a window needs max_ahead"
            num_tokens = min(num_tokens, num_computed + self._max_ahead)
        return pages_for(num_tokens, one.table.page_size)

    def slide(self, held: Held, num_tokens: int) -> None:
        """Exchange pages that windows have passed for those that the next step writes, where a row
        goes on to `num_tokens`.
        """
        lease = held.lease
        for name in self._sliding:
            group, had = self.groups[name], len(lease.pages[name])
            last = self.last_page(name, held.num_computed, num_tokens)
            if last > had:
                first = group.first_page(held.num_computed)
                self._shed(lease, name, first)
                passed = max(0, min(first, last) - had)
                fresh = [group.store.take() for _ in range(last - had - passed)]
                self.extend(lease, name, [DUMMY_PAGE] * passed + fresh)

    def _shed(self, lease: Lease, group: str, first: int) -> None:
        """Give back the pages of a group before the one of number `first`."""
        pages, one = lease.pages[group], self.groups[group]
        last = min(first, len(pages))
        start = last
        while start and pages[start - 1] != DUMMY_PAGE:
            start -= 1
        if start < last:
            for page in reversed(pages[start:last]):
                one.store.drop(page)
            lease.pages[group] = (DUMMY_PAGE,) * last + pages[last:]
            one.table.page_ids[lease.row, start:last] = DUMMY_PAGE

    def remove(self, lease: Lease) -> None:
        """Take a lease back, with its pages."""
        self.current(lease)
        lease.released = True
        del self._held[lease.row]
        for group, one in self.groups.items():
            one.table.reset(lease.row)
            # A page is found by way of those before it: they are evicted after it.
            for page in reversed(lease.pages[group]):
                if page != DUMMY_PAGE:
                    one.store.drop(page)

    def check(self) -> None:
        """InternalError when the books of a row are wrong, or those of a group do not fit them."""
        for group, one in self.groups.items():
            one.store.check()
            holders: collections.Counter[int] = collections.Counter()
            digests: dict[int, bytes] = {}
            for row, held in self._held.items():
                self._check_row(row, held, group)
                pages = held.lease.pages[group]
                holders.update(page for page in pages if page != DUMMY_PAGE)
                for page, digest in zip(pages, held.digests, strict=False):
                    if page != DUMMY_PAGE and digests.setdefault(page, digest) != digest:
                        raise InternalError(f"page {page} is shared by rows whose tokens differ")
            pool = one.store.pool
            for page in range(pool.num_pages):
                if pool.holders(page) != holders[page]:
                    raise InternalError(
                        f"page {page} is held {pool.holders(page)} times by count, "
                        f"and by {holders[page]} leases"
                    )

    def _check_row(self, row: int, held: Held, group: str) -> None:
        lease, one = held.lease, self.groups[group]
        table, pages, size = one.table.page_ids[row], lease.pages[group], one.table.page_size
        num_pages, first = len(pages), one.first_page(held.num_computed)
        kept = [page for page in pages if page != DUMMY_PAGE]
        promised = num_pages * size if one.window is None else lease.capacity
        right = (
            lease.row == row
            and not lease.released
            and lease.capacity == promised
            and num_pages >= pages_for(held.num_computed, size)
            and DUMMY_PAGE not in pages[first:]
            and pages[num_pages - len(kept) :] == tuple(kept)
            and len(set(kept)) == len(kept)
            and one.table.num_pages[row] == num_pages
            and tuple(table[:num_pages]) == pages
            and not table[num_pages:].any()
            and len(held.digests) * size <= held.num_computed <= lease.capacity
        )
        if not right:
            raise InternalError(f"the ledger's books are wrong at row {row}: {held}")
