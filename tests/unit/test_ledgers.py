"""Slot and page ledger keep the ledger contract, and the suite finds ledgers that do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from enginebay.contracts.cache import Lease, Ledger
from enginebay.contracts.prefix_key import NO_KEY, PrefixKey
from enginebay.errors import InternalError
from enginebay_contiguous.ledger import SlotLedger
from enginebay_paged.host_tier import HostTier, MoveLog
from enginebay_paged.lease_records import GroupPages
from enginebay_paged.ledger import PageLedger
from enginebay_paged.pool import PagePool
from enginebay_paged.prefix import PrefixIndex
from enginebay_paged.store import PageStore
from enginebay_runtime.rows import PageTable
from enginebay_testing.ledgers import ledger_checks
from tests.zoo import caches

NUM_ROWS, MAX_TOKENS = 4, 64


def make_slots(pages_per_slot: int) -> SlotLedger:
    ledger = SlotLedger(NUM_ROWS, MAX_TOKENS)
    ledger.pages_per_slot = pages_per_slot
    return ledger


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=f"{pages}-{name}")
        for pages in (1, 4)
        for name, check in ledger_checks(
            lambda pages=pages: make_slots(pages), NUM_ROWS, MAX_TOKENS, MAX_TOKENS // pages
        )
    ],
)
def test_slot_ledger_keeps_the_contract(check: Callable[[], None]) -> None:
    check()


def make_pages(
    num_pages: int, *, page_size: int = 8, caching: bool = True, grows: bool = True
) -> PageLedger:
    store = PageStore(PagePool(num_pages), PrefixIndex() if caching else None)
    table = PageTable(NUM_ROWS, -(-MAX_TOKENS // page_size), page_size)
    return PageLedger({"full": GroupPages(store, table)}, NUM_ROWS, MAX_TOKENS, grows=grows)


def make_tiers(num_slots: int, *windows: int) -> PageLedger:
    """A small pool of pages in front of slots of the host, and groups with a window, each with
    slots of its own.
    """
    log, groups = MoveLog(), {}
    for number, window in enumerate([None, *windows]):
        name = f"group {number}"
        most = 10 if window is None else 1 + NUM_ROWS * (-(-(window + 16) // 8) + 1)
        store = PageStore(PagePool(most), PrefixIndex(), host=HostTier(name, num_slots, log))
        groups[name] = GroupPages(store, PageTable(NUM_ROWS, MAX_TOKENS // 8, 8), window)
    return PageLedger(groups, NUM_ROWS, MAX_TOKENS, max_ahead=16, log=log)


def make_windows(windows: dict[str, int | None], num_pages: int, max_ahead: int) -> PageLedger:
    """Groups with a window have exactly the pages that all rows can hold."""

    def pages(window: int | None) -> GroupPages:
        most = NUM_ROWS * (-(-((window or 0) + max_ahead) // 8) + 1)
        pool = PagePool(num_pages if window is None else 1 + most)
        return GroupPages(
            PageStore(pool, PrefixIndex()), PageTable(NUM_ROWS, MAX_TOKENS // 8, 8), window
        )

    groups = {name: pages(window) for name, window in windows.items()}
    return PageLedger(groups, NUM_ROWS, MAX_TOKENS, max_ahead=max_ahead)


PAGED: dict[str, Callable[[], Ledger]] = {
    "room_for_all": lambda: make_pages(1 + NUM_ROWS * MAX_TOKENS // 8),
    "tight": lambda: make_pages(20),
    "room_for_one": lambda: make_pages(1 + MAX_TOKENS // 8),
    "no_prefixes": lambda: make_pages(20, caching=False),
    "all_at_once": lambda: make_pages(20, grows=False),
    "full_and_window": lambda: make_windows({"full": None, "window": 11}, 20, 16),
    "two_windows": lambda: make_windows({"short": 1, "full": None, "long": 17}, 33, 9),
    "states": caches.make(caches.StateLedger),
    "tiers": lambda: make_tiers(20),
    "few_slots": lambda: make_tiers(3),
    "tiers_and_windows": lambda: make_tiers(12, 11, 20),
    "window_alone": lambda: make_windows({"window": 8}, 0, 12),
}


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=f"{case}-{name}")
        for case, make in PAGED.items()
        for name, check in ledger_checks(make, NUM_ROWS, MAX_TOKENS, 8)
    ],
)
def test_page_ledger_keeps_the_contract(check: Callable[[], None]) -> None:
    check()


def test_holders_of_pages_are_rows_that_share_them_or_a_kept_prefix() -> None:
    ledger = make_pages(20)
    tokens = np.arange(17, dtype=np.int32)
    first = ledger.admit(0, tokens, 20)
    assert first is not None
    ledger.commit(first, tokens)
    assert ledger.page_holders()["full"].tolist() == [0, 1, 1, 1]
    second = ledger.admit(1, tokens, 20)
    assert second is not None
    assert ledger.page_holders()["full"].tolist() == [0, 2, 2, 1, 1]
    ledger.release(first)
    ledger.release(second)
    assert ledger.page_holders()["full"].tolist() == [0, -1, -1, 0, 0]


class Leaks(SlotLedger):
    """Never forgets a lease."""

    def release(self, lease: Lease) -> None:
        super().release(lease)
        self._leases[-len(self._leases) - 1] = lease


class ReleasesTwice(SlotLedger):
    """Takes a lease back as often as it is given."""

    def release(self, lease: Lease) -> None:
        lease.released = True
        self._leases.pop(lease.row, None)


class Shrinks(SlotLedger):
    """Cuts a promise to what was asked last."""

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        if num_tokens > self.max_model_len:
            return False
        lease.capacity = num_tokens
        return True


class GrowsWhatItRefuses(SlotLedger):
    """Notes a promise before it knows that it can be kept."""

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        lease.capacity = max(lease.capacity, num_tokens)
        return num_tokens <= self.max_model_len


class PromisesTooMuch(SlotLedger):
    """Admits whatever is asked."""

    def admit(
        self, row: int, prompt_token_ids: np.ndarray, num_tokens: int, key: PrefixKey = NO_KEY
    ) -> Lease | None:
        return super().admit(row, prompt_token_ids, min(num_tokens, self.max_model_len))


class OverlappingTables(SlotLedger):
    """Takes a slot for one page less than it has."""

    def write_table(self, group: str, leases: Sequence[Lease], table: np.ndarray) -> None:
        super().write_table(group, leases, table)
        for place, lease in enumerate(leases):
            table[place, : self.pages_per_slot] -= lease.row


class LeavesOldPages(SlotLedger):
    """Writes a row's pages and leaves the rest of the row as it was."""

    def write_table(self, group: str, leases: Sequence[Lease], table: np.ndarray) -> None:
        before = table.copy()
        super().write_table(group, leases, table)
        table[:, self.pages_per_slot :] = before[:, self.pages_per_slot :]


@pytest.mark.parametrize(
    ("broken", "found_by"),
    [
        (Leaks, "everything_given_back_is_free_again"),
        (ReleasesTwice, "releasing_twice_is_refused"),
        (Shrinks, "reserve_grows_and_never_shrinks"),
        (GrowsWhatItRefuses, "refused_calls_change_nothing"),
        (PromisesTooMuch, "refused_calls_change_nothing"),
        (OverlappingTables, "tables_of_rows_do_not_overlap"),
        (LeavesOldPages, "tables_hold_nothing_else"),
    ],
)
def test_broken_ledger_is_found(broken: type[SlotLedger], found_by: str) -> None:
    def make() -> SlotLedger:
        ledger = broken(NUM_ROWS, MAX_TOKENS)
        ledger.pages_per_slot = 4
        return ledger

    checks = dict(ledger_checks(make, NUM_ROWS, MAX_TOKENS))
    with pytest.raises((AssertionError, InternalError)):
        checks[found_by]()
