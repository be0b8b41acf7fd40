"""Beginning: the cached pages that a new row begins with, and how the row gets them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from enginebay.contracts.cache import Lease
from enginebay_paged.host_tier import MoveLog, PageSource
from enginebay_paged.lease_records import GroupPages
from enginebay_paged.pool import DUMMY_PAGE


@dataclasses.dataclass(slots=True)
class CachedPrefix:
    """The first `num_cached` tokens of a row are cached. `pages`: by group, the pages of the device
    that hold them; DUMMY_PAGE for a page that the host has under its hash in `digests`.
    """

    num_cached: int
    page_size: int
    pages: Mapping[str, Sequence[int]]
    digests: Sequence[bytes]
    num_prompt: int
    """Number of tokens of the row's prompt."""
    sources: dict[int, PageSource] = dataclasses.field(default_factory=dict)
    """Where the content of a page comes from that was not on the device, by number of the page."""

    @property
    def num_shared(self) -> int:
        """Number of full pages, which the row shares."""
        return self.num_cached // self.page_size

    def on_device(self, name: str) -> list[int]:
        """Return the pages of a group that the row can share at once."""
        return [page for page in self.pages[name][: self.num_shared] if page != DUMMY_PAGE]

    def give(self, name: str, group: GroupPages, last: int, log: MoveLog) -> list[int]:
        """Return the pages of a group for the row, `last` in number. The row shares the full cached
        pages, and the last partial page is copied to a page of its own.
        """
        first, store, num_shared = group.first_page(self.num_cached), group.store, self.num_shared
        cached = self.pages[name]
        # `take` may evict a page that no row holds, so the row first shares its cached pages.
        for page in cached[first:num_shared]:
            if page != DUMMY_PAGE:
                store.share(page)
        given = [*[DUMMY_PAGE] * first, *cached[first:num_shared]]
        missing = [i for i in range(first, num_shared) if given[i] == DUMMY_PAGE]
        for i in missing:
            given[i] = store.take()
        given += [store.take() for _ in range(last - num_shared)]
        if self.num_cached % self.page_size:
            # The row does not hold the partial page. `take` may have evicted it and even returned
            # it, but no move or step writes to the page before the copy.
            if cached[num_shared] != DUMMY_PAGE:
                log.copy(name, cached[num_shared], given[num_shared])
            else:
                self._bring(group, num_shared, given[num_shared])
        for i in missing:
            self._bring(group, i, given[i])
            store.name(self.digests[i], given[i])
        return given

    def _bring(self, group: GroupPages, number: int, page: int) -> None:
        host = group.store.host
        assert host is not None, "only a host tier has pages that are not on the device"
        source = host.bring(self.digests[number], page)
        if self.sources.get(number) != "disk":
            self.sources[number] = source

    def count(self, lease: Lease) -> None:
        """Record in the row's lease how many tokens came from the host and from files."""
        for number, source in self.sources.items():
            num = min(self.page_size, self.num_cached - number * self.page_size)
            if source == "disk":
                lease.num_from_disk += num
            else:
                lease.num_from_host += num
