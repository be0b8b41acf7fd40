"""A paged cache that starts small: whole when somebody needs more of it, with what was in it, and never smaller after a warm-up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import pytest

from enginebay import LLM, SamplingParams
from enginebay_oengine import sizing
from enginebay_oengine.engine import PagedEngine
from enginebay_oengine.pool import PagePool
from tests.brief import BRIEF

pytestmark = pytest.mark.xdist_group("oengine")

NUM_PAGES, FIRST_PAGES = 33, 9
SHORT, LONG = SamplingParams(max_tokens=6, ignore_eos=True), SamplingParams(max_tokens=40, ignore_eos=True)
PROMPT = list(range(300, 321))


def make_llm(**options: Any) -> LLM:
    engine = {"name": "oengine", "options": {"page_size": 8, "num_pages": NUM_PAGES} | options}
    return LLM(
        BRIEF,
        engine=engine,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        processors=(),
    )


def pages_of(llm: LLM) -> set[int]:
    """How many pages the arrays have."""
    engine = llm.engine
    assert isinstance(engine, PagedEngine)
    return {array.shape[0] for array in jax.tree.leaves(engine.runner.state.cache)}


def tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.fixture
def small_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of BRIEF start with FIRST_PAGES."""
    with make_llm() as llm:
        assert isinstance(llm.engine, PagedEngine)
        each = sizing.page_bytes(llm.engine.parts, llm.engine.geometry)
    monkeypatch.setattr(sizing, "FIRST_BYTES", each * FIRST_PAGES)


@pytest.fixture(scope="module")
def expected() -> Iterator[dict[str, list[tuple[int, ...]]]]:
    """Of a cache that is whole from the start."""
    with make_llm(grow=False) as llm:
        assert pages_of(llm) == {NUM_PAGES}
        yield {
            "short": tokens(llm, [PROMPT], SHORT),
            "batch": tokens(llm, [PROMPT[i:] for i in range(4)], LONG),
            "longer": tokens(llm, [[*PROMPT, *range(400, 420)]], LONG),
        }


@pytest.mark.usefixtures("small_start")
def test_one_short_request_needs_the_first_pages_only_and_a_batch_all(
    expected: dict[str, list[tuple[int, ...]]],
) -> None:
    with make_llm() as llm:
        assert tokens(llm, [PROMPT], SHORT) == expected["short"]
        assert pages_of(llm) == {FIRST_PAGES}
        # One after the other: each finds the first one's pages, which stay where they were.
        assert tokens(llm, [[*PROMPT, *range(400, 420)]], LONG) == expected["longer"]
        assert tokens(llm, [PROMPT[i:] for i in range(4)], LONG) == expected["batch"]
        assert pages_of(llm) == {NUM_PAGES}
        found = llm.generate([PROMPT], SHORT)[0]
        assert found.metrics.num_cached_tokens == 16
        assert found.outputs[0].token_ids == expected["short"][0]


@pytest.mark.usefixtures("small_start")
def test_pages_are_there_when_they_are_given_out_though_nobody_said_they_would_be(
    expected: dict[str, list[tuple[int, ...]]],
) -> None:
    """Prefixes that are kept take the first pages, so that a request that fits in them gets others."""
    with make_llm() as llm:
        for number in range(4):
            tokens(llm, [list(range(500 + 30 * number, 517 + 30 * number))], SHORT)
        assert pages_of(llm) == {NUM_PAGES}
        assert tokens(llm, [PROMPT], SHORT) == expected["short"]


@pytest.mark.usefixtures("small_start")
def test_a_warm_up_allocates_all_and_compiles_for_that_alone() -> None:
    with make_llm() as llm:
        assert pages_of(llm) == {FIRST_PAGES}
        engine = llm.engine
        assert isinstance(engine, PagedEngine)
        engine.pages.make_all()
        assert pages_of(llm) == {NUM_PAGES}
        engine.drop_arrays()
        engine.make_arrays()
        assert pages_of(llm) == {NUM_PAGES}, "what was compiled is for all pages"


def test_every_page_counts_from_the_lowest_one() -> None:
    """What was ever taken lies below the pool's reach, which pages that come back do not change."""
    pool = PagePool(9)
    taken = [pool.take() for _ in range(3)]
    assert (taken, pool.reach) == ([1, 2, 3], 4)
    for page in taken:
        pool.drop(page, keep=False)
    assert sorted(pool.take() for _ in range(3)) == [1, 2, 3]
    assert pool.reach == 4
