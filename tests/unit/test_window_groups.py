"""Groups with a window in the paged engine: the pages that a row holds, prefixes, forks, preemption
and sizes. The engine reads its cache by the page tables alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay.compose.composition import Composed, make_parts
from enginebay.contracts.cache import CacheGroup
from enginebay.contracts.cache_shape import CacheShape
from enginebay.contracts.engine import StepPlan
from enginebay.errors import ConfigError
from enginebay_paged.ledger import PageLedger
from enginebay_paged.options import PagedOptions
from enginebay_paged.pools import Pools
from enginebay_paged.sizing import pool_sizes
from enginebay_runtime.geometry import PoolSizes
from enginebay_runtime.memory import plan_memory
from enginebay_runtime.pages import copy_page
from tests.fake_engine import FakeEngine
from tests.fakes import compose_fake, expected_tokens
from tests.parity import tiny
from tests.unit.loops import Counts, Loops, alike, all_tokens, family, request, running

WINDOW, PAGE, CHUNK, STEPS, ROWS = 16, 8, 32, 4, 4
MOST = -(-(WINDOW + CHUNK + STEPS) // PAGE) + 1
"""Pages that a row holds at most, by the documented rule."""

NUM_PAGES, NUM_WINDOW_LAYERS = 33, 2
ONE_PAGE = dict.fromkeys(("full", "window"), CacheShape(1, 1, PAGE))


@pytest.fixture(scope="module", params=[None, 2**20], ids=["device", "host tier"])
def parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Composed:
    """A model with a window in two of three layers; pages of the full layer for one long row and a
    half.
    """
    folder = tiny.write_checkpoint(tmp_path_factory.mktemp("model"), "qwen2-some-windows")
    options = {"page_size": PAGE, "num_pages": NUM_PAGES, "prefix_host_bytes": request.param}
    return compose_fake("oengine", options, model=str(folder))


@pytest.fixture
def start(parts: Composed) -> Iterator[Loops]:
    parts.engine.drop_arrays()
    parts.engine.make_arrays()
    yield from running(parts)


def ledger_of(parts: Composed) -> PageLedger:
    assert isinstance(parts.engine.ledger, PageLedger)
    return parts.engine.ledger


def held_pages(parts: Composed) -> list[int]:
    """How many pages of the group with a window each step's rows hold; filled while steps run."""
    seen: list[int] = []

    def look(plan: StepPlan) -> None:
        ledger = ledger_of(parts)
        ledger.check()
        table = ledger.groups["window"].table.page_ids
        seen.extend(np.count_nonzero(table[[row.row for row in plan.rows]], axis=1).tolist())

    assert isinstance(parts.engine, FakeEngine)
    parts.engine.before_step = look
    return seen


def test_a_long_row_holds_the_pages_of_its_window_alone(parts: Composed, start: Loops) -> None:
    seen = held_pages(parts)
    (ticket,) = start().submit([request("a", 180, 60)])
    assert all_tokens([ticket]) == [expected_tokens(ticket.request, tiny.VOCAB_SIZE)]
    assert (WINDOW + CHUNK) // PAGE <= max(seen) <= MOST < 240 // PAGE


def test_rows_that_share_fork_and_are_preempted_have_the_tokens_of_rows_alone(
    parts: Composed, start: Loops
) -> None:
    seen = held_pages(parts)
    lengths = (40, 122, 90, 60, 151, 88)
    requests = [
        *(alike(name, length, 30) for name, length in zip("abcdef", lengths, strict=True)),
        *family("g", 77, 25, temperature=0.0),
        *family("h", 120, 9, temperature=0.7),
    ]
    loop, counts = start(), Counts()
    loop.observers.add(counts)
    wanted = [expected_tokens(one, tiny.VOCAB_SIZE) for one in requests]
    for turn in "xy":  # the second turn begins with what the first one left
        again = [
            dataclasses.replace(
                one,
                request_id=f"{turn} {one.request_id}",
                parent_id=one.parent_id and f"{turn} {one.parent_id}",
            )
            for one in requests
        ]
        assert all_tokens(loop.submit(again)) == wanted
    assert max(seen) <= MOST
    assert counts.num_preempted > 0


def test_a_prefix_is_found_only_where_the_pages_of_its_window_are_left(
    parts: Composed, start: Loops
) -> None:
    loop, ledger = start(), ledger_of(parts)
    first = request("a", 100, 8)
    all_tokens(loop.submit([first]))
    assert loop.call(lambda: ledger.num_cached_tokens(first.prompt_token_ids)) == 96
    store = ledger.groups["window"].store
    index = store.index
    assert index is not None

    def lose_all_but_one() -> int:
        while index.num_resting > 1:
            store.pool.reclaim(index.evict().page)
        return ledger.num_cached_tokens(first.prompt_token_ids)

    assert loop.call(lose_all_but_one) == 0, "the full layer's pages alone are not enough"
    again = dataclasses.replace(first, request_id="b")
    assert all_tokens(loop.submit([again])) == [expected_tokens(first, tiny.VOCAB_SIZE)]


def test_pools_of_windows_have_room_for_all_rows(parts: Composed) -> None:
    ledger = ledger_of(parts)
    pools = {name: group.store.pool.num_pages for name, group in ledger.groups.items()}
    assert pools == {"window": 1 + ROWS * MOST, "full": NUM_PAGES}
    assert ledger.num_free_tokens == (NUM_PAGES - 1) * PAGE


def test_the_memory_plan_counts_each_group_with_its_own_pages(parts: Composed) -> None:
    made = make_parts(parts.plan)
    (layer,) = {layout.num_bytes() for layout in made.layouts(ONE_PAGE).values()}
    windows = (1 + ROWS * MOST) * NUM_WINDOW_LAYERS * layer

    def sizes(**options: int) -> PoolSizes:
        return pool_sizes(made, PagedOptions(page_size=PAGE, **options))

    assert plan_memory(made, sizes(num_pages=40)).cache_bytes == windows + 40 * layer
    for room in (2, 7):
        whole = sizes(cache_bytes=windows + room * layer + layer // 2).whole
        assert whole["full"].num_pages == room
    with pytest.raises(
        ConfigError, match="2 pages of 8 tokens and the windows of max_num_seqs rows"
    ):
        sizes(cache_bytes=windows + layer)


def test_a_page_is_copied_within_its_own_group() -> None:
    """Groups in an order that is not that of their names, as in a model whose first layer has a
    window.
    """
    cache = {group: ({"k": jnp.arange(4.0)},) for group in ("window", "full")}
    pages = {"window": jnp.asarray([3, 1]), "full": jnp.asarray([0, 2])}
    copied = jax.jit(copy_page)(cache, pages)
    assert copied["window"][0]["k"].tolist() == [0, 3, 2, 3]
    assert copied["full"][0]["k"].tolist() == [0, 1, 0, 3]


def test_a_window_that_no_row_outgrows_is_none() -> None:
    pools = Pools(PAGE, 256, max_ahead=CHUNK + STEPS)
    kept = [
        pools.kept_window(CacheGroup("window", 1, 1, 8, 8, window)) for window in (16, 204, 205)
    ]
    assert kept == [16, 204, None]
    assert pools.row_pages(205) == pools.row_pages(None) == 256 // PAGE
