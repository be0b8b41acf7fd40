"""PrefixIndex: which page holds the keys and values of which tokens, by hashes that chain over full
pages.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import numpy as np

from enginebay.errors import InternalError
from enginebay.prefix_key import DIGEST_BYTES


def page_digests(
    parent: bytes,
    token_ids: np.ndarray,
    page_size: int,
    embeds: Mapping[int, bytes] = MappingProxyType({}),
    first: int = 0,
) -> Iterator[bytes]:
    """The hash of each full page of token_ids int32 [tokens], which follow the pages that `parent`
    is the last hash of; `first` is the number of the first of them.

    `embeds`: the content of embeddings by page, see `PrefixKey.by_page`. Each hash covers all that
    comes before it, and is the same in every process and on every machine.
    """
    data = np.asarray(token_ids, "<i4").tobytes()
    size = 4 * page_size
    for page, start in enumerate(range(0, len(data) - size + 1, size), first):
        content = data[start : start + size] + embeds.get(page, b"")
        parent = hashlib.blake2b(content, digest_size=DIGEST_BYTES, key=parent).digest()
        yield parent


class PrefixIndex:
    """Hash to page, and the pages that nobody holds in order of their last use.

    A *resting* page is one that nobody holds. It can be evicted, least recently used first, and is
    forgotten when it has rested for `ttl_s` seconds. Pages are named once: where two hold the same
    tokens, the first is in the index.
    """

    def __init__(self, ttl_s: float | None = None) -> None:
        self.ttl_s = ttl_s
        self._pages: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self._resting: collections.OrderedDict[int, float] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page: int) -> bool:
        return page in self._digests

    @property
    def num_resting(self) -> int:
        """Pages that could be evicted."""
        return len(self._resting)

    def find(self, digest: bytes) -> int | None:
        """The page with this hash."""
        return self._pages.get(digest)

    def add(self, digest: bytes, page: int) -> bool:
        """Name a page that somebody holds; False when another one has the hash already."""
        if page in self._digests:
            raise InternalError(f"page {page} is in the prefix index under another hash")
        if digest in self._pages:
            return False
        self._pages[digest] = page
        self._digests[page] = digest
        return True

    def rest(self, page: int, now_s: float) -> None:
        """Nobody holds the page any more."""
        self._resting[page] = now_s

    def wake(self, page: int) -> None:
        """Somebody holds the page again."""
        del self._resting[page]

    def is_resting(self, page: int) -> bool:
        """Whether nobody holds the page."""
        return page in self._resting

    def evict(self) -> int:
        """Forget the page that has rested longest, and return it. InternalError when none rests."""
        if not self._resting:
            raise InternalError("a page is to be evicted, and all are held")
        page, _ = self._resting.popitem(last=False)
        del self._pages[self._digests.pop(page)]
        return page

    def expire(self, now_s: float) -> list[int]:
        """Forget the pages that have rested for ttl_s, and return them."""
        gone: list[int] = []
        while self.ttl_s is not None and self._resting:
            if now_s - next(iter(self._resting.values())) < self.ttl_s:
                break
            gone.append(self.evict())
        return gone

    def clear(self) -> list[int]:
        """Forget everything, and return the pages that rested."""
        resting = list(self._resting)
        for part in (self._pages, self._digests, self._resting):
            part.clear()
        return resting

    def check(self) -> None:
        """InternalError when hashes and pages do not match."""
        if {page: digest for digest, page in self._pages.items()} != self._digests:
            raise InternalError(
                "the prefix index names a page that does not know it, or the other way round"
            )
        if not self._resting.keys() <= self._digests.keys():
            raise InternalError("a page rests that is not in the prefix index")
        times = list(self._resting.values())
        if times != sorted(times):
            raise InternalError("resting pages are not in the order of their last use")
