"""PageLedger: pages promised to rows as they grow, shared where their tokens are equal, copied
before they are written.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from enginebay.cache import Lease, Ledger
from enginebay.errors import InternalError
from enginebay.rows import PageTable
from enginebay_oengine.held import HeldPages
from enginebay_oengine.pool import pages_for
from enginebay_oengine.prefix import Salt
from enginebay_oengine.store import PageStore


class PageLedger(Ledger):
    """Pages for rows 0 to num_rows - 1, of up to max_model_len tokens each.

    A prompt gets the pages that hold its beginning already, and new ones for the rest. At least its
    last token is computed again, because its logits give the first new one; where all of it is
    there, the last page is copied first. A fork shares the full pages, and has a copy of the page
    that it goes on in: nobody ever writes to a page that others have. With `grows` the caller asks
    for what it needs now, and for more with `reserve`; without, for everything at once.
    """

    forks = True

    def __init__(
        self,
        store: PageStore,
        num_rows: int,
        max_model_len: int,
        *,
        grows: bool = True,
        table: PageTable | None = None,
    ) -> None:
        """`table` is where the pages of each row are written, for others to read; None: a table of
        its own.
        """
        self.store = store
        self.page_size = store.page_size
        self.num_rows = num_rows
        self.max_model_len = max_model_len
        self.grows = grows
        num_pages = pages_for(max_model_len, store.page_size)
        self._held = HeldPages(table or PageTable(num_rows, num_pages, store.page_size))
        self._copies: list[tuple[int, int]] = []

    @property
    def num_free_tokens(self) -> int:
        return self.store.available() * self.page_size

    @property
    def max_tokens(self) -> int:
        return min(self.max_model_len, self.store.pool.num_usable * self.page_size)

    def num_cached_tokens(self, token_ids: np.ndarray) -> int:
        return min(len(self.store.find(token_ids)) * self.page_size, len(token_ids) - 1)

    def admit(self, row: int, prompt_token_ids: np.ndarray, num_tokens: int) -> Lease | None:
        if row in self._held:
            raise InternalError(f"row {row} is admitted twice: release its lease first")
        num_prompt = len(prompt_token_ids)
        num_tokens = max(num_tokens, num_prompt)
        if num_tokens > self.max_tokens or row >= self.num_rows:
            return None
        found = self.store.find(prompt_token_ids)
        num_cached = min(len(found) * self.page_size, num_prompt - 1)
        return self._promise(
            row,
            num_cached,
            num_tokens,
            [page for _, page in found],
            [digest for digest, _ in found],
        )

    def fork(self, lease: Lease, row: int, num_cached: int, num_tokens: int) -> Lease | None:
        parent = self._held.current(lease)
        if row in self._held or num_cached > parent.num_computed:
            raise InternalError(
                f"row {row} is to share {num_cached} of {parent.num_computed} tokens with row "
                f"{lease.row}"
            )
        num_tokens = max(num_tokens, num_cached)
        if num_tokens > self.max_tokens or row >= self.num_rows:
            return None
        return self._promise(row, num_cached, num_tokens, lease.pages, parent.digests)

    def _promise(
        self,
        row: int,
        num_cached: int,
        num_tokens: int,
        pages: Sequence[int],
        digests: Sequence[bytes],
    ) -> Lease | None:
        """A lease that shares the full ones among the first `num_cached` tokens of `pages`, and
        copies the rest of them.
        """
        num_shared = num_cached // self.page_size
        shared = list(pages[:num_shared])
        num_fresh = pages_for(num_tokens, self.page_size) - num_shared
        if num_fresh > self.store.available(besides=shared):
            return None
        for page in shared:
            self.store.share(page)
        fresh = [self.store.take() for _ in range(num_fresh)]
        if num_cached % self.page_size:
            # This row does not hold the page, so it may be evicted by now; but no step writes to it
            # before the copy.
            self._copies.append((pages[num_shared], fresh[0]))
        return self._held.add(row, num_cached, list(digests[:num_shared]), shared + fresh)

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        # Whole pages are promised, so up to a page more than was asked for, perhaps past max_model_len:
        # the contract says "at least", and nobody else may write to these pages.
        if num_tokens <= lease.capacity and not lease.released:
            return True
        self._held.current(lease)
        missing = pages_for(num_tokens, self.page_size) - len(lease.pages)
        if num_tokens > self.max_tokens or missing > self.store.available():
            return False
        self._held.add_pages(lease, [self.store.take() for _ in range(missing)])
        return True

    def commit(self, lease: Lease, token_ids: np.ndarray) -> None:
        held = self._held.current(lease)
        held.num_computed = max(held.num_computed, len(token_ids))
        if len(token_ids) >= (len(held.digests) + 1) * self.page_size:
            self.store.name(held.digests, lease.pages, token_ids)

    def commit_rows(
        self, leases: Sequence[Lease], token_ids: np.ndarray, num_tokens: np.ndarray
    ) -> None:
        size, current = self.page_size, self._held.current
        for lease, num in zip(leases, num_tokens.tolist(), strict=True):
            held = current(lease)
            if num >= (len(held.digests) + 1) * size:
                self.commit(lease, token_ids[lease.row, :num])
            elif num > held.num_computed:
                held.num_computed = num

    def release(self, lease: Lease) -> None:
        self._held.remove(lease)
        for page in reversed(
            lease.pages
        ):  # a page is found by way of those before it: they are evicted after it
            self.store.drop(page)

    def take_copies(self) -> Sequence[tuple[int, int]]:
        copies, self._copies = self._copies, []
        return copies

    def write_table(self, leases: Sequence[Lease], table: np.ndarray) -> None:
        self._held.write_table(leases, table)

    def forget(self, salt: Salt | None = None) -> None:
        """Find nothing again of what was computed so far: the arrays are gone, or the weights are
        others (`salt`).
        """
        self.store.forget(salt)
        self._copies = []

    def check(self) -> None:
        self.store.check()
        self._held.check(self.store.pool)
