"""An agent's conversation over five templates: what the ledger has of each turn's prompt after the
turn before, when nothing of its answer is repeated.
"""

from __future__ import annotations

import numpy as np
import pytest

from enginebay.contracts.text import MAX_GENERATION_PROMPT
from enginebay_paged.lease_records import GroupPages
from enginebay_paged.ledger import PageLedger
from enginebay_paged.pool import PagePool
from enginebay_paged.pools import SNAPSHOTS_PER_ROW, Pools
from enginebay_paged.prefix import PrefixIndex
from enginebay_paged.state_places import StatePlaces
from enginebay_paged.store import PageStore
from enginebay_runtime.rows import PageTable
from tests.agent_talk import TEMPLATES, prompts

PAGE, CHUNK, MOST, WINDOW, NUM_ROWS = 64, 1024, 32768, 512, 4
NUM_NEW = 192
DEMANDED = 0.95


def make_ledger(kind: str) -> PageLedger:
    """A ledger of the sizes that the engine gives it by default: all groups keep whole rows, or one
    has a window, or one a recurrent state.
    """
    width = MOST // PAGE

    def store(num_pages: int) -> PageStore:
        return PageStore(PagePool(1 + num_pages), PrefixIndex())

    def table(columns: int = width) -> PageTable:
        return PageTable(NUM_ROWS, columns, PAGE)

    groups: dict[str, GroupPages | StatePlaces] = {
        "full": GroupPages(store(NUM_ROWS * width), table())
    }
    if kind == "window":
        each = Pools(PAGE, MOST, CHUNK).row_pages(WINDOW)
        groups["window"] = GroupPages(store(NUM_ROWS * each), table(), WINDOW)
    if kind == "state":
        groups["state"] = StatePlaces(store(NUM_ROWS * (1 + SNAPSHOTS_PER_ROW)), table(1), 512)
    return PageLedger(groups, NUM_ROWS, MOST, max_ahead=CHUNK)


def answer(ledger: PageLedger, prompt: np.ndarray, kind: int) -> float:
    """Compute a prompt as the loop does, and tokens that no prompt has; the cached share."""
    ids = np.concatenate([prompt, np.full(NUM_NEW, -kind, np.int32)])
    lease = ledger.admit(0, prompt, len(prompt) + 1)
    assert lease is not None
    done, reuse_at = lease.num_cached, len(prompt) - MAX_GENERATION_PROMPT
    while done < len(ids):
        if done < len(prompt):
            end = ledger.chunk_end(lease, len(prompt), reuse_at=reuse_at)
            done = min(end, done + CHUNK)
        else:
            done += 32
        assert ledger.reserve(lease, done)
        ledger.commit(lease, ids[:done])
    ledger.release(lease)
    ledger.take_moves()
    return lease.num_cached / len(prompt)


@pytest.mark.parametrize("kind", ["full", "window", "state"])
@pytest.mark.parametrize("reasons", [False, True])
@pytest.mark.parametrize("template", TEMPLATES)
def test_95_percent_of_each_later_prompt_are_cached(
    template: str, reasons: bool, kind: str
) -> None:
    ledger = make_ledger(kind)
    talk = [np.asarray(ids, np.int32) for ids in prompts(template, reasons=reasons)]
    shares = [answer(ledger, ids, turn) for turn, ids in enumerate(talk, 1)]
    assert shares[0] == 0.0
    assert min(shares[1:]) >= DEMANDED, " ".join(f"{share:.1%}" for share in shares)
    ledger.check()


@pytest.mark.parametrize("kind", ["window", "state"])
def test_agents_with_prompts_of_their_own_do_not_displace_one_another(kind: str) -> None:
    """As many agents as the engine has rows, in turn."""
    ledger = make_ledger(kind)
    shares: list[float] = []
    for turn, ids in enumerate(prompts("granite4", reasons=False)[:4], 1):
        for agent in range(NUM_ROWS):
            own = np.concatenate([[5000 + agent], ids]).astype(np.int32)
            shares.append(answer(ledger, own, 10 * turn + agent))
    assert min(shares[NUM_ROWS:]) >= DEMANDED, shares
