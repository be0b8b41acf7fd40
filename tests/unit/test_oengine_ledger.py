"""The page ledger: prefixes that are found, pages that are copied, evicted and forgotten, with the
books right after each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from enginebay.contracts.cache import Lease, PageMove
from enginebay.contracts.prefix_key import NO_KEY, PrefixKey
from enginebay.errors import InternalError
from enginebay_paged.lease_records import GroupPages, LeaseRecords
from enginebay_paged.ledger import PageLedger
from enginebay_paged.pool import PagePool
from enginebay_paged.prefix import PrefixIndex
from enginebay_paged.store import PageStore
from enginebay_runtime.rows import PageTable
from enginebay_testing.ledger_machine import LedgerModel

PAGE, ROWS, MOST = 8, 4, 64


class Clock:
    """Seconds as a test wants them."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make_ledger(
    num_pages: int = 1 + ROWS * MOST // PAGE,
    *,
    caching: bool = True,
    ttl_s: float | None = None,
    clock: Callable[[], float] | None = None,
) -> PageLedger:
    index = PrefixIndex(ttl_s) if caching else None
    store = PageStore(PagePool(num_pages), index, clock=clock or Clock())
    table = PageTable(ROWS, MOST // PAGE, PAGE)
    return PageLedger({"full": GroupPages(store, table)}, ROWS, MOST)


def store_of(ledger: PageLedger) -> PageStore:
    return ledger.groups["full"].store


def copies_of(ledger: PageLedger) -> list[tuple[int, int]]:
    moves = ledger.take_moves()
    assert {(move.kind, move.group) for move in moves} <= {("copy", "full")}
    return [(move.source, move.target) for move in moves]


def prompt(length: int, kind: int = 0) -> np.ndarray:
    return np.arange(length, dtype=np.int32) + 1000 * kind


def admit(
    ledger: PageLedger, row: int, token_ids: np.ndarray, more: int = 1, key: PrefixKey = NO_KEY
) -> Lease:
    lease = ledger.admit(row, token_ids, len(token_ids) + more, key)
    assert lease is not None
    ledger.check()
    return lease


def run(ledger: PageLedger, row: int, token_ids: np.ndarray, key: PrefixKey = NO_KEY) -> None:
    """A request from admission to release, all of it computed."""
    lease = admit(ledger, row, token_ids, key=key)
    ledger.commit(lease, token_ids)
    ledger.release(lease)
    ledger.check()


def test_rows_that_are_committed_together_are_found_as_if_alone() -> None:
    together, alone = make_ledger(), make_ledger()
    table = np.stack([prompt(MOST, kind) for kind in range(ROWS)])
    pairs = [
        [admit(ledger, row, table[row, :20]) for row in (2, 0)] for ledger in (together, alone)
    ]
    for num_tokens in ([7, 21], [16, 22], [17, 24]):
        together.commit_rows(pairs[0], table, np.asarray(num_tokens))
        for lease, num in zip(pairs[1], num_tokens, strict=True):
            alone.commit(lease, table[lease.row, :num])
        together.check()
        for row in (2, 0):
            found = [ledger.num_cached_tokens(table[row]) for ledger in (together, alone)]
            assert found[0] == found[1], (num_tokens, row)
    assert together.num_cached_tokens(table[0]) == 24
    assert together.fork(pairs[0][0], 1, 17, 18) is not None


def test_a_prompt_finds_the_pages_of_an_earlier_one() -> None:
    ledger = make_ledger()
    first = admit(ledger, 0, prompt(20))
    assert first.num_cached == 0
    ledger.commit(first, prompt(20))
    second = admit(ledger, 1, prompt(23))
    assert (second.num_cached, second.pages["full"][:2]) == (16, first.pages["full"][:2])
    assert not set(second.pages["full"][2:]) & set(first.pages["full"])
    ledger.release(first)
    ledger.release(second)
    assert ledger.num_cached_tokens(prompt(23)) == 16
    assert ledger.num_cached_tokens(prompt(23, kind=1)) == 0
    assert ledger.num_free_tokens == ROWS * MOST


def test_only_what_was_committed_is_found() -> None:
    ledger = make_ledger()
    first = admit(ledger, 0, prompt(40))
    assert admit(ledger, 1, prompt(40)).num_cached == 0
    ledger.commit(first, prompt(23))
    assert admit(ledger, 2, prompt(40)).num_cached == 16
    ledger.release(first)
    assert ledger.num_cached_tokens(prompt(40)) == 16


def test_output_is_found_like_a_prompt() -> None:
    ledger = make_ledger()
    lease = admit(ledger, 0, prompt(5))
    for length in range(5, 30):
        assert ledger.reserve(lease, length)
        ledger.commit(lease, prompt(length))
    ledger.release(lease)
    assert ledger.num_cached_tokens(prompt(60)) == 24


def test_the_last_token_is_always_computed_on_a_copy_of_its_page() -> None:
    ledger = make_ledger()
    run(ledger, 0, prompt(16))
    assert not copies_of(ledger)
    lease = admit(ledger, 0, prompt(16))
    assert lease.num_cached == 15
    (copy,) = copies_of(ledger)
    assert copy[1] == lease.pages["full"][1]
    assert copy[0] not in lease.pages["full"]
    again = admit(ledger, 1, prompt(16))
    assert again.pages["full"][0] == lease.pages["full"][0]
    assert again.pages["full"][1] != lease.pages["full"][1]
    assert admit(ledger, 2, prompt(17)).num_cached == 16


def test_a_cached_prompt_is_admitted_where_only_its_own_pages_are_left() -> None:
    """Then the page to be copied is itself taken: what is in it is still there when the copy
    runs.
    """
    ledger = make_ledger(num_pages=4)
    run(ledger, 0, prompt(16))
    lease = admit(ledger, 0, prompt(16), more=8)
    assert (lease.num_cached, len(lease.pages["full"]), ledger.num_free_tokens) == (15, 3, 0)
    assert len(copies_of(ledger)) == 1


def test_what_was_used_last_is_kept_longest() -> None:
    ledger = make_ledger(num_pages=7)
    run(ledger, 0, prompt(16, kind=1))
    run(ledger, 0, prompt(16, kind=2))
    run(ledger, 0, prompt(18, kind=1))
    big = admit(ledger, 1, prompt(30, kind=3))
    assert ledger.num_cached_tokens(prompt(17, kind=2)) == 0
    assert ledger.num_cached_tokens(prompt(17, kind=1)) == 16
    assert ledger.reserve(big, 40)
    assert ledger.num_cached_tokens(prompt(17, kind=1)) == 8, (
        "the end of a prompt goes before its beginning"
    )


def test_pages_that_are_held_are_never_evicted() -> None:
    ledger = make_ledger(num_pages=5)
    first = admit(ledger, 0, prompt(16))
    ledger.commit(first, prompt(16))
    assert ledger.admit(1, prompt(30, kind=1), 30) is None
    assert ledger.num_free_tokens == 8
    second = admit(ledger, 1, prompt(5, kind=1))
    assert not ledger.reserve(second, 9)
    assert second.capacity == 8
    ledger.release(first)
    assert ledger.reserve(second, 32)
    ledger.check()


def test_unused_pages_are_forgotten_after_their_time() -> None:
    clock = Clock()
    ledger = make_ledger(ttl_s=60.0, clock=clock)
    run(ledger, 0, prompt(24))
    held = admit(ledger, 1, prompt(9))
    clock.now_s = 61.0
    assert ledger.num_cached_tokens(prompt(24)) == 8, "what is in use is not forgotten"
    ledger.release(held)
    clock.now_s = 122.0
    assert ledger.num_cached_tokens(prompt(24)) == 0
    ledger.check()
    assert store_of(ledger).pool.num_free == ROWS * MOST // PAGE


def test_new_weights_find_nothing_of_the_old_ones() -> None:
    ledger = make_ledger()
    run(ledger, 0, prompt(24))
    running = admit(ledger, 1, prompt(17))
    ledger.commit(running, prompt(17))
    new = PrefixKey("new")
    assert ledger.num_cached_tokens(prompt(24), new) == 0
    ledger.commit(running, prompt(24))  # its first keys are of the old weights
    assert ledger.num_cached_tokens(prompt(32), new) == 0
    ledger.release(running)
    ledger.check()
    run(ledger, 0, prompt(24), new)
    assert ledger.num_cached_tokens(prompt(32), new) == 24


def test_without_an_index_nothing_is_kept() -> None:
    ledger = make_ledger(caching=False)
    run(ledger, 0, prompt(24))
    assert (ledger.num_cached_tokens(prompt(24)), store_of(ledger).pool.num_cached) == (0, 0)
    assert admit(ledger, 0, prompt(24)).num_cached == 0


@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_shares_full_pages_and_copies_the_one_it_goes_on_in(caching: bool) -> None:
    ledger = make_ledger(caching=caching)
    parent = admit(ledger, 0, prompt(12))
    ledger.commit(parent, prompt(12))
    free = ledger.num_free_tokens
    children = [ledger.fork(parent, row, 11, 13) for row in (1, 2)]
    for child in children:
        assert child is not None
        assert (child.num_cached, child.pages["full"][0]) == (11, parent.pages["full"][0])
    assert copies_of(ledger) == [
        (parent.pages["full"][1], child.pages["full"][1]) for child in children if child
    ]
    assert free - ledger.num_free_tokens == 2 * PAGE
    before = dict(parent.pages)
    assert ledger.reserve(parent, 13)
    assert parent.pages == before
    assert not copies_of(ledger)
    ledger.check()


def test_a_fork_that_ends_with_a_page_copies_nothing() -> None:
    ledger = make_ledger()
    parent = admit(ledger, 0, prompt(16))
    ledger.commit(parent, prompt(16))
    child = ledger.fork(parent, 1, 16, 17)
    assert child is not None
    assert child.pages["full"][:2] == parent.pages["full"][:2]
    assert not copies_of(ledger)


def test_a_fork_outlives_its_parent_and_waits_for_room() -> None:
    ledger = make_ledger(num_pages=5)
    parent = admit(ledger, 0, prompt(16))
    ledger.commit(parent, prompt(16))
    assert ledger.fork(parent, 1, 15, 25) is None, (
        "three pages are wanted beside the shared one, one is free"
    )
    child = ledger.fork(parent, 1, 15, 16)
    assert child is not None
    ledger.release(parent)
    assert len(copies_of(ledger)) == 1
    assert ledger.reserve(child, 25)
    ledger.check()


def test_only_what_is_committed_is_forked() -> None:
    ledger = make_ledger()
    parent = admit(ledger, 0, prompt(9))
    with pytest.raises(InternalError, match="is to share 9 of 0 tokens"):
        ledger.fork(parent, 1, 9, 9)


def test_a_copy_that_is_not_made_is_seen_by_the_suite() -> None:
    class Forgetful(PageLedger):
        def take_moves(self) -> Sequence[PageMove]:
            super().take_moves()
            return ()

    ledger = Forgetful(make_ledger().groups, ROWS, MOST)
    world = LedgerModel(ledger, ROWS, MOST, PAGE)
    for row in (0, 1):
        assert world.add(row, world.prompt(0, 0, (1, 2), 0), 1)
        if row == 0:
            assert world.step(row, 16)
            world.commit(row)
    with pytest.raises(AssertionError, match="row 1 finds other tokens' keys at position 8"):
        world.step(1, 1)


@pytest.mark.parametrize(
    ("break_it", "found"),
    [
        (
            lambda ledger, lease: store_of(ledger).pool.share(lease.pages["full"][0]),
            "held 2 times by count, and by 1",
        ),
        (lambda _, lease: setattr(lease, "capacity", 99), "ledger is inconsistent at row 0"),
        (
            lambda _, lease: lease.pages.update(full=lease.pages["full"][::-1]),
            "ledger is inconsistent at row 0",
        ),
        (
            lambda ledger, lease: store_of(ledger).index.rest(lease.pages["full"][0], 0.0),
            "0 pages are cached, and 1",
        ),
    ],
)
def test_broken_books_are_found(
    break_it: Callable[[PageLedger, Lease], object], found: str
) -> None:
    ledger = make_ledger()
    lease = admit(ledger, 0, prompt(17))
    ledger.commit(lease, prompt(17))
    break_it(ledger, lease)
    with pytest.raises(InternalError, match=found):
        ledger.check()


def test_more_hashes_than_computed_pages_are_found() -> None:
    pool = PagePool(5)
    held = LeaseRecords({"full": GroupPages(PageStore(pool), PageTable(ROWS, MOST // PAGE, PAGE))})
    one = held.add(0, 2 * PAGE, [b"a", b"b"], {"full": [pool.take() for _ in range(3)]})
    one.lease.capacity = 3 * PAGE
    held.check()
    one.digests.append(b"x")
    with pytest.raises(InternalError, match="ledger is inconsistent at row 0"):
        held.check()


def test_a_promise_is_never_shorter_than_the_prompt_or_what_is_shared() -> None:
    ledger = make_ledger(caching=False)
    head = ledger.admit(0, prompt(20), 1)
    assert head is not None
    assert head.capacity >= 20
    ledger.commit(head, prompt(20))
    other = ledger.fork(head, 1, 18, 1)
    assert other is not None
    assert other.capacity >= 18
    ledger.check()


def test_rows_share_pages_under_equal_keys_alone() -> None:
    ledger, salted = make_ledger(), PrefixKey("w", "salt")
    run(ledger, 0, prompt(24), salted)
    others = [NO_KEY, PrefixKey("w"), PrefixKey("", "salt"), PrefixKey("v", "salt")]
    assert [ledger.num_cached_tokens(prompt(24), key) for key in others] == [0] * 4
    assert ledger.num_cached_tokens(prompt(24), salted) == 23
    assert admit(ledger, 0, prompt(24), key=salted).num_cached == 23


def test_equal_embeddings_share_pages_and_others_only_what_stands_before() -> None:
    ledger = make_ledger()

    def key(*embeds: tuple[int, bytes]) -> PrefixKey:
        return PrefixKey(embeds=embeds)

    first = key((9, b"a" * 16), (10, b"b" * 16))
    run(ledger, 0, prompt(24), first)
    assert PAGE == 8
    assert ledger.num_cached_tokens(prompt(32), first) == 24
    assert ledger.num_cached_tokens(prompt(32)) == PAGE
    assert ledger.num_cached_tokens(prompt(32), key((9, b"a" * 16), (10, b"c" * 16))) == PAGE
    assert ledger.num_cached_tokens(prompt(32), key((1, b"a" * 16))) == 0
    held = admit(ledger, 0, prompt(32), key=first)
    ledger.commit(held, prompt(32))  # goes on in pages that were found
    fork = ledger.fork(held, 1, 32, 40)
    assert fork is not None
    ledger.commit(fork, prompt(40))
    assert ledger.num_cached_tokens(prompt(41), first) == 40
    assert ledger.num_cached_tokens(prompt(41)) == PAGE
