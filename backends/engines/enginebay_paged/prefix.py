"""PrefixIndex: maps hashes of token prefixes to the pages with their keys and values."""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from enginebay.contracts.prefix_key import DIGEST_BYTES, PrefixKey
from enginebay.errors import InternalError


def key_digest(key: PrefixKey) -> bytes:
    """Return the hash that the chain of page hashes begins with; the same in every process."""
    text = json.dumps([key.weights, key.salt, *([key.adapter] if key.adapter else [])])
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


def embeds_by_page(key: PrefixKey, page_size: int) -> dict[int, bytes]:
    """Return, for each page with embeddings, their concatenated hashes, by page number."""
    pages: dict[int, bytes] = {}
    for position, digest in key.embeds:
        page = position // page_size
        pages[page] = pages.get(page, b"") + digest
    return pages


def page_digests(
    parent: bytes,
    token_ids: np.ndarray,
    page_size: int,
    embeds: Mapping[int, bytes] = MappingProxyType({}),
    first: int = 0,
) -> Iterator[bytes]:
    """Yield the hash of each full page of token_ids int32 [tokens]. `parent` is the hash of the
    page before, and `first` the number of the first page.

    `embeds`: hashes of embeddings by page, see `embeds_by_page`. Each hash covers all tokens
    before it, and is equal in every process and on every machine.
    """
    data = np.asarray(token_ids, "<i4").tobytes()
    size = 4 * page_size
    for page, start in enumerate(range(0, len(data) - size + 1, size), first):
        content = data[start : start + size] + embeds.get(page, b"")
        parent = hashlib.blake2b(content, digest_size=DIGEST_BYTES, key=parent).digest()
        yield parent


class Evicted(NamedTuple):
    """A page that left the index, the hash of its tokens, and when it began to rest."""

    page: int
    digest: bytes
    since_s: float


MIN_PER_PASSED = 4
"""Resting pages for each passed page that stays when space is needed."""


class RestingPages:
    """The pages without a holder, in two queues: pages that a request ended with or that a second
    request used, and *passed* pages, which the only row that used them has left behind.

    The oldest passed page is evicted next while more than one in MIN_PER_PASSED pages is passed,
    and otherwise the oldest other page. So a long prompt, which leaves many pages behind, does not
    displace the pages where other conversations go on.
    """

    def __init__(self) -> None:
        self._queues = collections.OrderedDict[int, float](), collections.OrderedDict[int, float]()

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __contains__(self, page: int) -> bool:
        return any(page in queue for queue in self._queues)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain(*self._queues)

    def add(self, page: int, now_s: float, *, is_passed: bool = False) -> None:
        """Add a page to the end of its queue."""
        self._queues[is_passed][page] = now_s

    def remove(self, page: int) -> None:
        """Remove a page from its queue. KeyError when it does not rest."""
        del self._queues[page in self._queues[True]][page]

    def pop(self, *, latest: bool = False) -> tuple[int, float]:
        """Remove the next page to evict, and return it with the time since when it rests. `latest`:
        the page that was used last, passed pages after all others. KeyError without a page.
        """
        kept, passed = self._queues
        if latest:
            return (kept or passed).popitem(last=True)
        is_passed = MIN_PER_PASSED * len(passed) > len(self)
        return (passed if is_passed else kept).popitem(last=False)

    def pop_older(self, since_s: float) -> int | None:
        """Remove a page that rests since this time or longer, and return it; None without one."""
        for queue in self._queues:
            page = next(iter(queue), None)
            if page is not None and queue[page] <= since_s:
                del queue[page]
                return page
        return None

    @property
    def oldest_s(self) -> float | None:
        """The time since when the page rests that rests longest; None without a page."""
        return min((next(iter(queue.values())) for queue in self._queues if queue), default=None)

    def clear(self) -> None:
        """Remove all pages."""
        for queue in self._queues:
            queue.clear()

    def check(self) -> None:
        """Raise InternalError when a queue is not ordered by time, or both have a page."""
        for queue in self._queues:
            times = list(queue.values())
            if times != sorted(times):
                raise InternalError("resting pages are not ordered by last use")
        if len(set(self)) != len(self):
            raise InternalError("a page rests in both queues")


class PrefixIndex:
    """Maps hashes to pages, and orders the pages without a holder by last use.

    A *resting* page has no holder. It can be evicted, in the order of RestingPages, and expires
    after `ttl_s` seconds of rest. Each hash has one page: of two pages with equal tokens, the first
    is indexed.
    """

    def __init__(self, ttl_s: float | None = None, idle_s: float | None = None) -> None:
        """`idle_s`: seconds of rest after which an engine without requests frees a page."""
        self.ttl_s, self.idle_s = ttl_s, idle_s
        self._pages: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self._resting = RestingPages()
        self._shared: set[int] = set()
        """Pages that a second request has used."""

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page: int) -> bool:
        return page in self._digests

    @property
    def num_resting(self) -> int:
        """Number of pages that can be evicted."""
        return len(self._resting)

    def find(self, digest: bytes) -> int | None:
        """Return the page with this hash, or None."""
        return self._pages.get(digest)

    def add(self, digest: bytes, page: int) -> bool:
        """Add a page that has a holder. Returns False when another page has this hash already."""
        if page in self._digests:
            raise InternalError(f"page {page} is in the prefix index with another hash")
        if digest in self._pages:
            return False
        self._pages[digest] = page
        self._digests[page] = digest
        return True

    def rest(self, page: int, now_s: float, *, is_passed: bool = False) -> None:
        """Record that the page has no holder any more. `is_passed`: its row has left it behind."""
        self._resting.add(page, now_s, is_passed=is_passed and page not in self._shared)

    def wake(self, page: int) -> None:
        """Record that the page has another holder."""
        if page in self._resting:
            self._resting.remove(page)
        if page in self._digests:
            self._shared.add(page)

    def is_resting(self, page: int) -> bool:
        """Return whether the page has no holder."""
        return page in self._resting

    def evict(self, *, latest: bool = False) -> Evicted:
        """Remove the next page to evict, or the latest one, and return it. InternalError when no
        page rests.
        """
        if not len(self._resting):
            raise InternalError("evict() without a resting page")
        page, since_s = self._resting.pop(latest=latest)
        return Evicted(page, self._remove(page), since_s)

    def _remove(self, page: int) -> bytes:
        digest = self._digests.pop(page)
        del self._pages[digest]
        self._shared.discard(page)
        return digest

    def expire(self, now_s: float, rest_s: float | None = None) -> list[int]:
        """Remove the pages that have rested for `rest_s` seconds, ttl_s if None, and return
        them.
        """
        rest_s = self.ttl_s if rest_s is None else rest_s
        gone: list[int] = []
        while rest_s is not None and (page := self._resting.pop_older(now_s - rest_s)) is not None:
            self._remove(page)
            gone.append(page)
        return gone

    def next_expiry_s(self, now_s: float, rest_s: float) -> float | None:
        """Return the seconds until the page that rests longest has rested for `rest_s` seconds;
        None when no page rests.
        """
        oldest_s = self._resting.oldest_s
        return None if oldest_s is None else max(0.0, oldest_s + rest_s - now_s)

    def clear(self) -> list[int]:
        """Remove all pages, and return the pages that rested."""
        resting = list(self._resting)
        for part in (self._pages, self._digests, self._resting, self._shared):
            part.clear()
        return resting

    def check(self) -> None:
        """Raise InternalError when hashes and pages do not match."""
        if {page: digest for digest, page in self._pages.items()} != self._digests:
            raise InternalError("the prefix index's maps of hashes and of pages do not match")
        if not {*self._resting, *self._shared} <= self._digests.keys():
            raise InternalError("a resting or shared page is not in the prefix index")
        self._resting.check()
