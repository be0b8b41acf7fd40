"""Recurrent states in the books of the paged engine: places, snapshots, and what goes on
from them.
"""

from __future__ import annotations

import numpy as np

from enginebay.contracts.cache import Lease
from enginebay_paged.lease_records import GroupPages
from enginebay_paged.ledger import PageLedger
from enginebay_paged.pool import PagePool
from enginebay_paged.prefix import PrefixIndex
from enginebay_paged.state_places import StatePlaces
from enginebay_paged.store import PageStore
from enginebay_runtime.rows import PageTable

PAGE, ROWS, MOST = 4, 3, 64


def make_ledger(num_snapshots: int = 6, *, every: int = 8, caches: bool = True) -> PageLedger:
    index = PrefixIndex() if caches else None
    pages = GroupPages(PageStore(PagePool(40), index), PageTable(ROWS, MOST // PAGE, PAGE))
    store = PageStore(PagePool(1 + ROWS + num_snapshots), PrefixIndex())
    states = {"conv": StatePlaces(store, PageTable(ROWS, 1, MOST), every)}
    return PageLedger({"full": pages, **states}, ROWS, MOST)


def copies_of(ledger: PageLedger) -> list[tuple[int, int]]:
    moves = [move for move in ledger.take_moves() if move.group == "conv"]
    assert {move.kind for move in moves} <= {"copy"}
    return [(move.source, move.target) for move in moves]


def tokens(num: int, first: int = 1) -> np.ndarray:
    return np.arange(first, first + num, dtype=np.int32)


def prefill(
    ledger: PageLedger, lease: Lease, prompt: np.ndarray, fork_at: int | None = None
) -> list[int]:
    """Compute a prompt as the loop does; where its chunks end."""
    ends, done = [], lease.num_cached
    while done < len(prompt):
        done = ledger.chunk_end(lease, len(prompt), fork_at)
        ledger.commit(lease, prompt[:done])
        ledger.check()
        ends.append(done)
    return ends


def admit(ledger: PageLedger, row: int, prompt: np.ndarray) -> Lease:
    lease = ledger.admit(row, prompt, len(prompt) + 1)
    assert lease is not None
    return lease


def test_prompts_are_cut_where_states_are_kept() -> None:
    """Every eight tokens, at the last full page, and where others fork."""
    ledger = make_ledger()
    assert prefill(ledger, admit(ledger, 0, tokens(23)), tokens(23)) == [8, 16, 20, 23]
    prompt = tokens(15, 100)
    assert prefill(ledger, admit(ledger, 1, prompt), prompt, 14) == [8, 12, 14, 15]
    without = make_ledger(caches=False)
    assert prefill(without, admit(without, 0, prompt), prompt, 14) == [14, 15]
    assert prefill(without, admit(without, 1, prompt), prompt) == [15]


def test_a_chat_is_cut_before_its_generation_prompt() -> None:
    """The next turn's prompt repeats the tokens before it alone."""
    ledger, prompt = make_ledger(), tokens(22)
    lease = admit(ledger, 0, prompt)
    ends, done = [], 0
    while done < len(prompt):
        done = ledger.chunk_end(lease, len(prompt), reuse_at=19)
        ledger.commit(lease, prompt[:done])
        ends.append(done)
    assert ends == [8, 16, 22]
    following = np.concatenate([prompt[:19], tokens(20, 500)])
    assert ledger.num_cached_tokens(following) == 16
    other = make_ledger(every=16)
    lease = admit(other, 0, prompt)
    assert [other.chunk_end(lease, len(prompt), reuse_at=15)] == [12]


def test_long_prompts_do_not_displace_where_conversations_go_on() -> None:
    """Each conversation makes more snapshots than there is room for, and goes on from its last."""
    ledger, ends = make_ledger(6), []
    prompts = [tokens(41, 100 * n) for n in (1, 2, 3)]
    for _ in range(2):
        for number, prompt in enumerate(prompts):
            lease = admit(ledger, 0, prompt)
            ends.append(lease.num_cached)
            prefill(ledger, lease, prompt)
            ledger.release(lease)
            prompts[number] = np.concatenate([prompt, tokens(4, 1000 * (number + 1))])
    assert ends == [0, 0, 0, 40, 40, 40]


def test_a_hit_ends_at_a_snapshot_and_copies_it() -> None:
    ledger, prompt = make_ledger(), tokens(23)
    first = admit(ledger, 0, prompt)
    prefill(ledger, first, prompt)
    kept = copies_of(ledger)
    (place,) = first.pages["conv"]
    assert [source for source, _ in kept] == [place] * 3
    for other, num_cached in ((prompt, 20), (tokens(40), 20), (tokens(18), 16), (tokens(8), 0)):
        assert ledger.num_cached_tokens(other) == num_cached
        lease = admit(ledger, 1, other)
        assert lease.num_cached == num_cached
        copies = copies_of(ledger)
        snapshots = [target for _, target in kept]
        wanted = {
            20: [(snapshots[2], lease.pages["conv"][0])],
            16: [(snapshots[1], lease.pages["conv"][0])],
        }
        assert copies == wanted.get(num_cached, [])
        ledger.release(lease)
        ledger.check()


def test_forks_begin_at_the_snapshot_before_the_last_token() -> None:
    for caches in (True, False):
        ledger, prompt = make_ledger(caches=caches), tokens(15)
        parent = admit(ledger, 0, prompt)
        prefill(ledger, parent, prompt, 14)
        _, snapshot = copies_of(ledger)[-1]
        for row in (1, 2):
            child = ledger.fork(parent, row, 14, 16)
            assert child is not None
            assert child.num_cached == 14
            assert copies_of(ledger) == [(snapshot, child.pages["conv"][0])]
        ledger.check()


def test_the_last_snapshot_makes_room_for_the_row_that_goes_on_from_it() -> None:
    ledger, prompt = make_ledger(num_snapshots=0, caches=False), tokens(15)
    parent = admit(ledger, 0, prompt)
    prefill(ledger, parent, prompt, 14)
    _, snapshot = copies_of(ledger)[-1]
    for row in (1, 2):
        child = ledger.fork(parent, row, 14, 16)
        assert child is not None
        assert child.num_cached == 14
        assert copies_of(ledger) == [(snapshot, child.pages["conv"][0])]
    assert child.pages["conv"] == (snapshot,)
    ledger.release(child)
    ledger.check()
    anew = ledger.fork(parent, 2, 14, 16)
    assert anew is not None
    assert anew.num_cached == 0, "the snapshot is gone: the row's state begins at zero"
    ledger.check()


def test_rows_have_places_whatever_is_kept() -> None:
    """Snapshots make room for rows, the least recently used one first."""
    ledger = make_ledger(num_snapshots=2)
    for first in range(0, 4000, 200):
        prompt = tokens(23, first + 1)
        lease = admit(ledger, first // 200 % ROWS, prompt)
        prefill(ledger, lease, prompt)
        assert ledger.num_cached_tokens(prompt) == 20, "the latest one is kept"
        ledger.release(lease)
    rows = [admit(ledger, row, tokens(5, 9000 + 100 * row)) for row in range(ROWS)]
    ledger.check()
    for lease in rows:
        ledger.release(lease)
    ledger.forget()
    assert ledger.num_cached_tokens(tokens(23, 3801)) == 0
    ledger.check()


def test_a_step_is_given_the_place_of_each_row() -> None:
    ledger = make_ledger()
    leases = [admit(ledger, row, tokens(5, 100 * row + 1)) for row in range(ROWS)]
    table = np.full((ROWS, 2), 7, np.int32)
    ledger.write_table("conv", leases[::-1], table)
    assert table.tolist() == [[lease.pages["conv"][0], 0] for lease in leases[::-1]]
    assert len(set(table[:, 0]) - {0}) == ROWS
