"""HeldPages: the pages that each row holds in each cache group, and their page tables."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from enginebay.contracts.cache import Lease
from enginebay.contracts.cache_shape import pages_for
from enginebay.contracts.prefix_key import NO_KEY, PrefixKey
from enginebay.errors import InternalError
from enginebay_paged.pool import DUMMY_PAGE
from enginebay_paged.store import PageStore
from enginebay_runtime.rows import PageTable


@dataclasses.dataclass(frozen=True, eq=False)
class GroupPages:
    """The pages of one cache group: its store, and the page table of the rows.

    `window`: a row keeps the pages of its last `window` positions and releases earlier pages. None:
    a row keeps all pages. A group with a window has room for all rows.
    """

    store: PageStore
    table: PageTable
    window: int | None = None

    def first_page(self, num_tokens: int) -> int:
        """Return the first page that a row needs to continue after `num_tokens` tokens."""
        if self.window is None:
            return 0
        return max(0, num_tokens + 1 - self.window) // self.table.page_size


@dataclasses.dataclass(slots=True)
class LeaseRecord:
    """The ledger's record of a lease."""

    lease: Lease
    num_computed: int
    """Tokens whose keys and values are in the pages; later positions may be written."""
    digests: list[bytes]
    """Hashes of the first full pages."""
    key: PrefixKey
    """The PrefixKey of these hashes."""
    num_prompt: int
    """Number of tokens of the row's prompt."""
    cut: int | None = None
    """Number of tokens after which a snapshot of the row's states is made."""
    is_forked: bool = False
    """Whether the row can be forked at that snapshot."""
    is_passed: bool = False
    """Whether the row makes a snapshot after that one."""
    fork_point: tuple[int, bytes] | None = None
    """Number of tokens of the snapshot for forks, and its hash."""


class LeaseRecords:
    """The records of all leases that are not released, by row."""

    def __init__(self, groups: Mapping[str, GroupPages], max_ahead: int | None = None) -> None:
        """`max_ahead`: tokens after the computed ones for which a group with a window
        holds pages.
        """
        self.groups = groups
        self._max_ahead = max_ahead
        self._sliding = [name for name, group in groups.items() if group.window is not None]
        self._held: dict[int, LeaseRecord] = {}

    def __contains__(self, row: int) -> bool:
        return row in self._held

    def __len__(self) -> int:
        return len(self._held)

    def current(self, lease: Lease) -> LeaseRecord:
        """Return the record of a lease. InternalError when the lease was released."""
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
        *,
        num_prompt: int = 0,
    ) -> LeaseRecord:
        """Add a lease of these pages by group; the first pages hold `num_cached` tokens of a prompt
        of `num_prompt` tokens.
        """
        lease = Lease(row=row, capacity=0, num_cached=num_cached, pages=dict.fromkeys(pages, ()))
        held = self._held[row] = LeaseRecord(lease, num_cached, digests, key, num_prompt)
        for group, its_pages in pages.items():
            self.extend(lease, group, its_pages)
        return held

    def extend(self, lease: Lease, group: str, pages: Sequence[int]) -> None:
        """Append pages of a group to a lease."""
        self.groups[group].table.append(lease.row, pages)
        lease.pages[group] = (*lease.pages[group], *pages)

    def last_page(self, group: str, num_computed: int, num_tokens: int) -> int:
        """Return the number of pages of a group that a row of `num_tokens` holds or has released,
        when `num_computed` of the tokens are computed.
        """
        one = self.groups[group]
        if one.window is not None:
            assert self._max_ahead is not None, "a group with a window needs max_ahead"
            num_tokens = min(num_tokens, num_computed + self._max_ahead)
        return pages_for(num_tokens, one.table.page_size)

    def slide(self, held: LeaseRecord, num_tokens: int) -> None:
        """Release a row's pages before the window, and take pages for the tokens that the next step
        writes. The row continues to `num_tokens`.
        """
        lease = held.lease
        for name in self._sliding:
            group, had = self.groups[name], len(lease.pages[name])
            last = self.last_page(name, held.num_computed, num_tokens)
            if last > had:
                first = group.first_page(held.num_computed)
                self._drop_before(held, name, first)
                passed = max(0, min(first, last) - had)
                fresh = [group.store.take() for _ in range(last - had - passed)]
                self.extend(lease, name, [DUMMY_PAGE] * passed + fresh)

    def _drop_before(self, held: LeaseRecord, group: str, first: int) -> None:
        """Release a group's pages before page number `first`. The window at the prompt's end is not
        passed: the next turn's prompt may differ from there on.
        """
        lease, one = held.lease, self.groups[group]
        pages, size = lease.pages[group], one.table.page_size
        kept = range(one.first_page(held.num_prompt - size), pages_for(held.num_prompt, size))
        last = min(first, len(pages))
        start = last
        while start and pages[start - 1] != DUMMY_PAGE:
            start -= 1
        if start < last:
            # In order: a row continues where the last `window` positions are cached, so the pages
            # before them must be evicted earlier.
            for number, page in enumerate(pages[start:last], start):
                one.store.drop(page, is_passed=number not in kept)
            lease.pages[group] = (DUMMY_PAGE,) * last + pages[last:]
            one.table.page_ids[lease.row, start:last] = DUMMY_PAGE

    def remove(self, lease: Lease) -> None:
        """Release a lease and its pages."""
        self.current(lease)
        lease.released = True
        del self._held[lease.row]
        for group, one in self.groups.items():
            one.table.reset(lease.row)
            # In reverse order: a page is only found through the pages before it, so these must be
            # evicted later.
            for page in reversed(lease.pages[group]):
                if page != DUMMY_PAGE:
                    one.store.drop(page)

    def check(self) -> None:
        """Raise InternalError when the records, page tables and pools do not agree."""
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

    def _check_row(self, row: int, held: LeaseRecord, group: str) -> None:
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
            raise InternalError(f"the ledger is inconsistent at row {row}: {held}")
