"""Faulty caches: ledgers of pages that promise too much, share what differs, or lose what was given
back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from enginebay.contracts.cache import Lease, Ledger, PageMove
from enginebay.contracts.prefix_key import NO_KEY, PrefixKey
from enginebay_paged.group_prefixes import GroupPrefixes
from enginebay_paged.host_tier import HostTier, MoveLog
from enginebay_paged.lease_records import GroupPages, LeaseRecord
from enginebay_paged.ledger import PageLedger
from enginebay_paged.pool import PagePool
from enginebay_paged.prefix import PrefixIndex
from enginebay_paged.state_places import StatePlaces
from enginebay_paged.store import PageStore
from enginebay_runtime.rows import PageTable
from enginebay_testing.ledgers import ledger_checks
from enginebay_testing.verdicts import Check

NUM_ROWS, MAX_TOKENS, PAGE_SIZE, NUM_PAGES = 4, 64, 8, 20
NUM_TIERED_PAGES, NUM_SLOTS = 10, 6
NUM_SNAPSHOTS, SNAPSHOT_TOKENS = 6, 16


def make(kind: type[PageLedger]) -> Callable[[], Ledger]:
    """Makes ledgers of a kind over a pool of pages with a prefix index; a StateLedger has a group
    with a state too.
    """

    def ledger() -> Ledger:
        log = MoveLog()
        pool, host = PagePool(NUM_PAGES), None
        if issubclass(kind, TieredLedger):
            pool, host = PagePool(NUM_TIERED_PAGES), kind.make_tier("full", NUM_SLOTS, log)
        store = PageStore(pool, PrefixIndex(None), host=host)
        table = PageTable(NUM_ROWS, MAX_TOKENS // PAGE_SIZE, PAGE_SIZE)
        groups: dict[str, GroupPages | StatePlaces] = {"full": GroupPages(store, table)}
        if issubclass(kind, StateLedger):
            groups["conv"] = kind.make_places(
                PageStore(PagePool(1 + NUM_ROWS + NUM_SNAPSHOTS), PrefixIndex(None)),
                PageTable(NUM_ROWS, 1, MAX_TOKENS),
                SNAPSHOT_TOKENS,
            )
        return kind(groups, NUM_ROWS, MAX_TOKENS, log=log)

    return ledger


class StateLedger(PageLedger):
    """A right ledger with a group that has a state."""

    make_places: ClassVar[type[StatePlaces]] = StatePlaces


class TieredLedger(PageLedger):
    """A right ledger that moves evicted pages to the host."""

    make_tier: ClassVar[type[HostTier]] = HostTier


class Generous(PageLedger):
    """Says that a token more is free than there is."""

    @property
    def num_free_tokens(self) -> int:
        return super().num_free_tokens + 1


class TooLarge(PageLedger):
    """Promises a row more than it can have when it is alone."""

    @property
    def max_tokens(self) -> int:
        return super().max_tokens + PAGE_SIZE


class Forgetful(PageLedger):
    """Says of a found prefix that a token less is cached than the lease says."""

    def num_cached_tokens(self, token_ids: np.ndarray, key: PrefixKey = NO_KEY) -> int:
        return max(0, super().num_cached_tokens(token_ids, key) - 1)


class Whole(PageLedger):
    """Says that a whole prompt is cached when all its pages are found."""

    def admit(
        self, row: int, prompt_token_ids: np.ndarray, num_tokens: int, key: PrefixKey = NO_KEY
    ) -> Lease | None:
        lease = super().admit(row, prompt_token_ids, num_tokens, key)
        if lease is not None and lease.num_cached == len(prompt_token_ids) - 1:
            lease.num_cached += 1
        return lease


class Leaky(PageLedger):
    """Keeps the last page of a released lease."""

    def release(self, lease: Lease) -> None:
        pages = lease.pages["full"]
        lease.pages["full"] = pages[:-1] or pages
        super().release(lease)


class Lenient(PageLedger):
    """Takes a lease back twice."""

    def release(self, lease: Lease) -> None:
        if not lease.released:
            super().release(lease)


class Silent(PageLedger):
    """Does not say of a lease that it is released."""

    def release(self, lease: Lease) -> None:
        super().release(lease)
        lease.released = False


class Shrinking(PageLedger):
    """Cuts a promise to what was asked for last."""

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        done = super().reserve(lease, num_tokens)
        lease.capacity = num_tokens if done else lease.capacity
        return done


class Refusing(PageLedger):
    """Refuses the last token that a row may have."""

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        return num_tokens < MAX_TOKENS and super().reserve(lease, num_tokens)


class Dirty(PageLedger):
    """Leaves what was in a table behind a row's pages."""

    def write_table(self, group: str, leases: Sequence[Lease], table: np.ndarray) -> None:
        before = table.copy()
        super().write_table(group, leases, table)
        for i, lease in enumerate(leases):
            num_pages = len(lease.pages[group])
            table[i, num_pages:] = before[i, num_pages:]


class Sorted(PageLedger):
    """Writes the rows of a table in the order of the rows, not of the leases."""

    def write_table(self, group: str, leases: Sequence[Lease], table: np.ndarray) -> None:
        super().write_table(group, sorted(leases, key=lambda lease: lease.row), table)


class Uncopied(PageLedger):
    """Forgets the copies of pages that rows share and write to."""

    def take_moves(self) -> Sequence[PageMove]:
        super().take_moves()
        return ()


class Anywhere(StateLedger):
    """Ends a hit at any page, with a snapshot or without."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._prefixes = GroupPrefixes(self.groups)


class Unrestored(StateLedger):
    """Forgets the copies of states."""

    def take_moves(self) -> Sequence[PageMove]:
        return [move for move in super().take_moves() if move.group not in self.states]


class Late(StateLedger):
    """Does not cut prompts: keeps the state after a later token under the hash of a snapshot
    point.
    """

    def chunk_end(
        self,
        lease: Lease,
        num_tokens: int,
        fork_at: int | None = None,
        reuse_at: int | None = None,
    ) -> int:
        super().chunk_end(lease, num_tokens, fork_at, reuse_at)
        return num_tokens

    def commit(self, lease: Lease, token_ids: np.ndarray) -> None:
        held = self._held.current(lease)
        cut = held.cut
        super().commit(lease, token_ids)
        if cut is not None and cut < len(token_ids):
            held.num_computed = cut
            self._keep(held)
            held.num_computed = len(token_ids)


class LongFork(StateLedger):
    """Says of a fork that it goes on from where it was asked to, and gives it an earlier state."""

    def _fork_from(self, parent: LeaseRecord, num_cached: int) -> tuple[int, bytes | None]:
        return num_cached, super()._fork_from(parent, num_cached)[1]


class InPlace(StatePlaces):
    """Gives a row the snapshot itself, which can still be found."""

    def give(self, row: int, snapshot: bytes | None) -> tuple[int, int | None]:
        source = None if snapshot is None else self.store.find(snapshot)
        if source is None or not self.store.pool.num_cached:
            return super().give(row, snapshot)
        self.store.share(source)
        self._places[row] = source
        self.table.append(row, [source])
        return source, source


class Overwriting(StateLedger):
    """Writes to snapshots that can still be found."""

    make_places = InPlace


class NextPlace(StatePlaces):
    """Copies the place behind a snapshot."""

    def give(self, row: int, snapshot: bytes | None) -> tuple[int, int | None]:
        place, source = super().give(row, snapshot)
        return place, None if source is None else (source % self.store.pool.num_usable) + 1


class Elsewhere(StateLedger):
    """Copies another snapshot than the one that was found."""

    make_places = NextPlace


class Squatting(StateLedger):
    """Names the first place for every row."""

    def write_table(self, group: str, leases: Sequence[Lease], table: np.ndarray) -> None:
        super().write_table(group, leases, table)
        if group in self.states:
            table[: len(leases), 0] = 1


class Kept(StateLedger):
    """Keeps the place of a row that has ended."""

    def release(self, lease: Lease) -> None:
        for state in self._states.values():
            state.store.share(state._places[lease.row])
        super().release(lease)


class Hasty(TieredLedger):
    """Writes to pages before it saves what they hold."""

    def take_moves(self) -> Sequence[PageMove]:
        return sorted(super().take_moves(), key=lambda move: move.kind == "out")


class Unsaved(TieredLedger):
    """Forgets the moves to the host."""

    def take_moves(self) -> Sequence[PageMove]:
        return [move for move in super().take_moves() if move.kind != "out"]


class Eager(HostTier):
    """Gives the slots of pages away that the request under admission needs."""

    def need(self, digest: bytes) -> None:
        """Keep nothing."""


class Recycling(TieredLedger):
    """Saves pages to slots whose pages a later move brings."""

    make_tier = Eager


class Outside(TieredLedger):
    """Uses a slot that is not among its `host_slots`."""

    def take_moves(self) -> Sequence[PageMove]:
        return [
            dataclasses.replace(move, target=move.target + 1) if move.kind == "out" else move
            for move in super().take_moves()
        ]


FAULTS: dict[str, type[PageLedger]] = {
    kind.__name__: kind
    for kind in (
        *(Generous, TooLarge, Forgetful, Whole, Leaky, Lenient, Silent),
        *(Shrinking, Refusing, Dirty, Sorted, Uncopied),
        *(Hasty, Unsaved, Recycling, Outside),
        *(Anywhere, Unrestored, Late, LongFork, Overwriting, Elsewhere, Squatting, Kept),
    )
}

RIGHT: dict[str, type[PageLedger]] = {
    "pages": PageLedger,
    "pages and states": StateLedger,
    "pages and a host tier": TieredLedger,
}


def checks(part: type[PageLedger]) -> list[Check]:
    """The kit's suite."""
    return ledger_checks(make(part), NUM_ROWS, MAX_TOKENS, PAGE_SIZE)
