"""PageLedger: allocates pages to rows as they grow. Rows with equal tokens share pages; a shared
page is copied before it is written; pages before a window are released.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from enginebay.contracts.cache import Lease, Ledger, PageMove
from enginebay.contracts.cache_shape import pages_for
from enginebay.contracts.prefix_key import NO_KEY, PrefixKey
from enginebay.errors import InternalError
from enginebay_paged.cached_prefix import CachedPrefix
from enginebay_paged.group_prefixes import GroupPrefixes
from enginebay_paged.host_tier import MoveLog
from enginebay_paged.lease_records import GroupPages, LeaseRecord, LeaseRecords
from enginebay_paged.pool import DUMMY_PAGE
from enginebay_paged.state_places import StatePlaces


class PageLedger(Ledger):
    """Pages for rows 0 to num_rows - 1, of up to max_model_len tokens each.

    A prompt gets the cached pages of its beginning, and new pages for the rest. At least its last
    token is computed again, because its logits give the first new token; if the whole prompt is
    cached, the last page is copied first. A fork shares the full pages of its parent and copies the
    page in which it continues, so no row writes to a page of another row. With `grows` the caller
    requests the tokens that it needs now and more with `reserve`; otherwise it requests all at
    once.

    In a group with a window, a row has pages for `max_ahead` tokens after the committed ones and
    releases the pages before its window. A prompt continues from the longest cached prefix whose
    last `window` positions are cached.

    In a group with a recurrent state, a row has one place. Prefill chunks end where snapshots are
    made: every `snapshot_tokens`, at the last full page, and where forks start. A prompt continues
    from the longest prefix with a snapshot; a fork continues from its parent's snapshot or from
    such a prefix.
    """

    forks = True

    def __init__(
        self,
        groups: Mapping[str, GroupPages | StatePlaces],
        num_rows: int,
        max_model_len: int,
        *,
        max_ahead: int | None = None,
        grows: bool = True,
        log: MoveLog | None = None,
    ) -> None:
        """`max_ahead` is required if a group has a window. All groups must have the same page size.
        `log`: the move log of the groups' host tiers.
        """
        pages = {name: one for name, one in groups.items() if isinstance(one, GroupPages)}
        self._states = {n: one for n, one in groups.items() if isinstance(one, StatePlaces)}
        self.groups = groups = pages
        self.windows = {name: group.window for name, group in groups.items()}
        self.max_ahead = max_ahead
        self.page_size = next(iter(groups.values())).table.page_size
        self.num_rows = num_rows
        self.max_model_len = max_model_len
        self.grows = grows
        self._growing = [name for name, window in self.windows.items() if window is None]
        self._sliding = [name for name, window in self.windows.items() if window is not None]
        self._held = LeaseRecords(groups, max_ahead)
        self.states, self._num_kept = tuple(self._states), 0
        every = min((one.snapshot_tokens for one in self._states.values()), default=1)
        self._snapshot_tokens = pages_for(every, self.page_size) * self.page_size
        self._prefixes = GroupPrefixes(groups, list(self._states.values()))
        self._log = log or MoveLog()
        tiers = {name: one.store.host for name, one in groups.items()}
        self.host_slots = {name: one.num_slots for name, one in tiers.items() if one is not None}

    @property
    def num_free_tokens(self) -> int:
        if not self._growing:
            return (self.num_rows - len(self._held)) * self.max_model_len
        return self.page_size * min([self.groups[g].store.available() for g in self._growing])

    @property
    def max_tokens(self) -> int:
        pools = [self.groups[name].store.pool for name in self._growing]
        return min([self.max_model_len, *[pool.num_usable * self.page_size for pool in pools]])

    def num_cached_tokens(self, token_ids: np.ndarray, key: PrefixKey = NO_KEY) -> int:
        return min(len(self._prefixes.find(token_ids, key)) * self.page_size, len(token_ids) - 1)

    def admit(
        self, row: int, prompt_token_ids: np.ndarray, num_tokens: int, key: PrefixKey = NO_KEY
    ) -> Lease | None:
        if row in self._held:
            raise InternalError(f"row {row} is admitted twice: release its lease first")
        num_prompt = len(prompt_token_ids)
        num_tokens = max(num_tokens, num_prompt)
        if num_tokens > self.max_tokens or row >= self.num_rows:
            return None
        digests = self._prefixes.find(prompt_token_ids, key, recall=bool(self.host_slots))
        num_cached = min(len(digests) * self.page_size, num_prompt - 1)
        snapshot = digests[-1] if digests else None
        pages = self._prefixes.pages(digests)
        begin = CachedPrefix(num_cached, self.page_size, pages, digests, num_prompt)
        return self._promise(row, begin, num_tokens, key, snapshot)

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
        pages: Mapping[str, Sequence[int]] = lease.pages
        snapshot = None
        if self._states:
            num_cached, snapshot = self._fork_from(parent, num_cached)
        last = pages_for(num_cached, self.page_size)
        if any(
            DUMMY_PAGE in pages[name][self.groups[name].first_page(num_cached) : last]
            for name in self._sliding
        ):  # The parent has released these pages since; the index may still have them.
            known = self._prefixes.resumable(parent.digests[: num_cached // self.page_size])
            pages, num_cached = (
                self._prefixes.pages(known) | {name: lease.pages[name] for name in self._growing},
                len(known) * self.page_size,
            )
            snapshot = known[-1] if known else None
        num_prompt = parent.num_prompt
        begin = CachedPrefix(num_cached, self.page_size, pages, parent.digests, num_prompt)
        return self._promise(row, begin, num_tokens, parent.key, snapshot)

    def _fork_from(self, parent: LeaseRecord, num_cached: int) -> tuple[int, bytes | None]:
        """Number of the row's first `num_cached` tokens that a fork can use, and the hash of its
        snapshot.
        """
        point = parent.fork_point
        if point and point[0] <= num_cached and self._prefixes.has_snapshots(point[1]):
            return point
        known = self._prefixes.resumable(parent.digests[: num_cached // self.page_size])
        return len(known) * self.page_size, known[-1] if known else None

    def _promise(
        self,
        row: int,
        begin: CachedPrefix,
        num_tokens: int,
        key: PrefixKey,
        snapshot: bytes | None,
    ) -> Lease | None:
        """Make a lease that shares the full pages of `begin`, and copies the last partial page and
        the states of `snapshot`.
        """
        num_pages = pages_for(num_tokens, self.page_size)
        for name in self._growing:
            shared = begin.on_device(name)
            if num_pages - len(shared) > self.groups[name].store.available(besides=shared):
                return None
        if self.host_slots:
            self._prefixes.need(begin.digests)
        num_cached, given = begin.num_cached, dict[str, list[int]]()
        for name, group in self.groups.items():
            last = self._held.last_page(name, num_cached, num_tokens)
            given[name] = begin.give(name, group, last, self._log)
        if self.host_slots:
            self._prefixes.settle()
        digests, num_prompt = list(begin.digests[: begin.num_shared]), begin.num_prompt
        held = self._held.add(row, num_cached, digests, given, key, num_prompt=num_prompt)
        begin.count(held.lease)
        held.lease.capacity = num_pages * self.page_size
        for name, state in self._states.items():
            place, source = state.give(row, snapshot)
            held.lease.pages[name] = (place,)
            if source is not None:
                self._log.copy(name, source, place)
        return held.lease

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        # The capacity is rounded up to whole pages, perhaps past max_model_len: the contract says
        # "at least", and no other row may write to these pages.
        if num_tokens <= lease.capacity and not lease.released and not self._sliding:
            return True
        held = self._held.current(lease)
        num_pages = pages_for(num_tokens, self.page_size)
        missing = num_pages - lease.capacity // self.page_size
        if num_tokens > self.max_tokens or any(
            missing > self.groups[name].store.available() for name in self._growing
        ):
            return False
        if missing > 0:
            for name in self._growing:
                store = self.groups[name].store
                self._held.extend(lease, name, [store.take() for _ in range(missing)])
            lease.capacity = num_pages * self.page_size
        self._held.slide(held, num_tokens)
        return True

    def resume(self, lease: Lease, num_tokens: int) -> Mapping[str, np.ndarray]:
        held = self._held.current(lease)
        held.num_computed = max(held.num_computed, num_tokens)
        self._held.slide(held, lease.capacity)
        # Shared pages have these keys and values already; the step writes them to the dummy page.
        stores = {name: group.store for name, group in self.groups.items()}
        return {
            name: np.asarray(
                [
                    p if name in self._states or (p and stores[name].is_private(p)) else DUMMY_PAGE
                    for p in pages
                ]
            )
            for name, pages in lease.pages.items()
        }

    def chunk_end(
        self,
        lease: Lease,
        num_tokens: int,
        fork_at: int | None = None,
        reuse_at: int | None = None,
    ) -> int:
        if not self._states:
            return num_tokens
        held, every = self._held.current(lease), self._snapshot_tokens
        start, points = held.num_computed, [] if fork_at is None else [fork_at]
        last = num_tokens - 1 if reuse_at is None else min(reuse_at, num_tokens - 1)
        last_page = last // self.page_size * self.page_size
        if self._prefixes.keeps_pages:
            points += [(start // every + 1) * every, last_page]
        held.cut = min((point for point in points if start < point < num_tokens), default=None)
        held.is_forked = held.cut == fork_at
        held.is_passed = held.cut not in (fork_at, last_page)
        return num_tokens if held.cut is None else held.cut

    def commit(self, lease: Lease, token_ids: np.ndarray) -> None:
        held = self._held.current(lease)
        held.num_computed = max(held.num_computed, len(token_ids))
        self._prefixes.name(held.digests, lease, token_ids, held.key)
        if held.cut == len(token_ids):
            self._keep(held)

    def _keep(self, held: LeaseRecord) -> None:
        """Keep a snapshot of a row's states after its computed tokens."""
        num_pages, rest = divmod(held.num_computed, self.page_size)
        if rest or num_pages > len(held.digests):  # only forks find it, through the lease
            self._num_kept += 1
            digest = b"fork %d" % self._num_kept
        else:
            digest = held.digests[num_pages - 1]
        for name, state in self._states.items():
            copy = state.keep(held.lease.row, digest, is_passed=held.is_passed)
            if copy is not None:
                self._log.copy(name, *copy)
        if held.is_forked:
            held.fork_point = held.num_computed, digest

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
        for state in self._states.values():
            state.remove(lease.row)

    def take_moves(self) -> Sequence[PageMove]:
        return self._log.take()

    def save_pages(self) -> None:
        self._prefixes.settle()
        for group in self.groups.values():
            index = group.store.index
            while index is not None and index.num_resting:
                group.store.evict(index, at_end=True)

    def write_table(self, group: str, leases: Sequence[Lease], table: np.ndarray) -> None:
        found = self._states.get(group) or self.groups[group]
        page_ids = found.table.page_ids
        width = min(table.shape[1], page_ids.shape[1])
        table[:] = DUMMY_PAGE
        table[: len(leases), :width] = page_ids[[lease.row for lease in leases], :width]

    @property
    def reach(self) -> Mapping[str, int]:
        return {name: group.store.pool.reach for name, group in self.groups.items()}

    def drop_idle(self) -> float | None:
        stores = [one.store for one in self.groups.values()]
        states = [one.store for one in self._states.values()]
        due = [s for store in (*stores, *states) if (s := store.expire(idle=True)) is not None]
        return min(due, default=None)

    def free_pages(self) -> Mapping[str, np.ndarray]:
        stores = {name: one.store for name, one in self.groups.items()}
        stores |= {name: one.store for name, one in self._states.items()}
        return {name: store.pool.take_stale() for name, store in stores.items()}

    def page_holders(self) -> Mapping[str, np.ndarray]:
        return {name: one.store.pool.all_holders() for name, one in self.groups.items()}

    def forget(self) -> None:
        self._prefixes.forget()
        self._log.take()

    def check(self) -> None:
        self._held.check()
        for state in self._states.values():
            state.check()
