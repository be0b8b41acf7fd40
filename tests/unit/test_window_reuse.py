"""Where the next turn of a conversation goes on in a group with a window: after the turn before, or
before its generation prompt, whatever other rows have used since.
"""

from __future__ import annotations

import numpy as np
import pytest

from enginebay_paged.lease_records import GroupPages
from enginebay_paged.ledger import PageLedger
from enginebay_paged.pool import PagePool
from enginebay_paged.pools import Pools
from enginebay_paged.prefix import PrefixIndex
from enginebay_paged.store import PageStore
from enginebay_runtime.rows import PageTable

PAGE, WINDOW, AHEAD, MOST = 8, 32, 64, 1024


def make_ledger(num_rows: int) -> PageLedger:
    """A ledger of the sizes that the engine gives it."""
    width = MOST // PAGE
    each = Pools(PAGE, MOST, AHEAD).row_pages(WINDOW)

    def group(num_pages: int, window: int | None) -> GroupPages:
        store = PageStore(PagePool(1 + num_pages), PrefixIndex())
        return GroupPages(store, PageTable(num_rows, width, PAGE), window)

    groups = {"full": group(num_rows * width, None), "window": group(num_rows * each, WINDOW)}
    return PageLedger(groups, num_rows, MOST, max_ahead=AHEAD)


def answer(ledger: PageLedger, prompt: np.ndarray, num_new: int, kind: int) -> int:
    """Compute a prompt in chunks, and an answer to it; how many tokens were cached."""
    ids = np.concatenate([prompt, np.arange(num_new, dtype=np.int32) + 10_000 * kind])
    lease = ledger.admit(0, prompt, len(prompt) + 1)
    assert lease is not None
    done = lease.num_cached
    while done < len(ids):
        step = AHEAD if done < len(prompt) else 1
        done = min(done + step, len(prompt) if done < len(prompt) else len(ids))
        assert ledger.reserve(lease, done)
        ledger.commit(lease, ids[:done])
    ledger.check()
    ledger.release(lease)
    return lease.num_cached


def prompt(length: int, kind: int) -> np.ndarray:
    return np.arange(length, dtype=np.int32) + 100_000 * kind


@pytest.mark.parametrize("num_prompt", [344, 368, 400])
@pytest.mark.parametrize("num_new", [8, 40, 56])
def test_a_row_alone_goes_on_before_its_generation_prompt(num_prompt: int, num_new: int) -> None:
    """The answer is not repeated, as when a template drops reasoning."""
    ledger = make_ledger(1)
    assert answer(ledger, prompt(num_prompt + 4, 1), num_new, 7) == 0
    following = np.concatenate([prompt(num_prompt, 1), prompt(30, 2)])
    assert answer(ledger, following, num_new, 8) == num_prompt


def test_each_of_several_conversations_goes_on_after_the_long_prompts_of_the_others() -> None:
    ledger, found = make_ledger(4), []
    talks = [prompt(404, kind) for kind in range(1, 5)]
    for turn in range(3):
        for number, talk in enumerate(talks):
            found.append(answer(ledger, talk, 24, 20 + turn))
            talks[number] = np.concatenate([talk[:-4], prompt(20, 40 + 10 * turn + number)])
    assert found == [*[0] * 4, *[400] * 4, *[416 - 416 % PAGE] * 4]
