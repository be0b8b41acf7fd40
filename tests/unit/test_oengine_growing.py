"""A paged cache that starts small: whole when somebody needs more of it, with what was in it, and
never smaller after a warm-up.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import pytest

from enginebay import LLM, SamplingParams
from enginebay.config import make_config
from enginebay.contracts.cache_shape import CacheShape
from enginebay_paged import sizing
from enginebay_paged.engine import is_paged
from enginebay_paged.pool import PagePool
from enginebay_runtime.memory import shape_bytes
from enginebay_runtime.pages import PageMover
from enginebay_xla.platforms import CpuPlatform
from tests.pool import EnginePool
from tests.unit import loops
from tests.unit.loops import NUM_PAGES, PAGE_SIZE, PAGED

pytestmark = pytest.mark.xdist_group("tiny")

FIRST_PAGES = 9
SHORT, LONG = (
    SamplingParams(max_tokens=6, ignore_eos=True),
    SamplingParams(max_tokens=40, ignore_eos=True),
)
PROMPT = list(range(30, 51))
LONGER = [*PROMPT, *range(60, 80)]
BATCH = [PROMPT[i:] for i in range(4)]


def make_llm() -> LLM:
    """A fresh engine that compiles what it needs; with small_start its cache starts small."""
    return LLM(
        config=make_config(loops.tiny("oengine", **PAGED).model_dump(), {"forbid_compiling": False})
    )


def pages_of(llm: LLM) -> set[int]:
    """How many pages the arrays have."""
    engine = llm.engine
    assert is_paged(engine)
    return {array.shape[0] for array in jax.tree.leaves(engine.executor.arrays().cache)}


def tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@dataclasses.dataclass(frozen=True)
class Expected:
    """The tokens of a cache that is whole from the start, and the bytes of a page."""

    short: Any
    longer: Any
    batch: Any
    page_bytes: int


@pytest.fixture(scope="module")
def expected(engine_pool: EnginePool) -> Expected:
    with engine_pool.leases(), loops.make_llm("oengine", **PAGED) as llm:
        assert pages_of(llm) == {NUM_PAGES}
        found = [
            tokens(llm, *asked) for asked in (([PROMPT], SHORT), ([LONGER], LONG), (BATCH, LONG))
        ]
        assert is_paged(llm.engine)
        return Expected(
            *found, shape_bytes(llm.engine.parts, {"full": CacheShape(1, 1, PAGE_SIZE)})
        )


@pytest.fixture
def small_start(monkeypatch: pytest.MonkeyPatch, expected: Expected) -> None:
    """Caches start with FIRST_PAGES, as where making an array clears its memory."""
    monkeypatch.setattr(CpuPlatform, "demand_memory", False)
    monkeypatch.setattr(sizing, "FIRST_BYTES", expected.page_bytes * FIRST_PAGES)


@pytest.mark.long
@pytest.mark.usefixtures("small_start")
def test_one_short_request_needs_the_first_pages_only_and_a_batch_all(
    expected: Expected,
) -> None:  # holds OG1
    with make_llm() as llm:
        assert tokens(llm, [PROMPT], SHORT) == expected.short
        assert pages_of(llm) == {FIRST_PAGES}
        # One after the other: each finds the first one's pages, which stay where they were.
        assert tokens(llm, [LONGER], LONG) == expected.longer
        assert tokens(llm, BATCH, LONG) == expected.batch
        assert pages_of(llm) == {NUM_PAGES}
        found = llm.generate([PROMPT], SHORT)[0]
        assert found.metrics.num_cached_tokens == 16
        assert found.outputs[0].token_ids == expected.short[0]


@pytest.mark.usefixtures("small_start")
@pytest.mark.long
def test_pages_are_there_when_they_are_given_out_though_nobody_said_they_would_be(
    expected: Expected,
) -> None:  # holds OG1
    """Prefixes that are kept take the first pages, so that a request that fits in them gets
    others.
    """
    with make_llm() as llm:
        for number in range(4):
            tokens(llm, [[number + 4 * i for i in range(17)]], SHORT)
        assert pages_of(llm) == {NUM_PAGES}
        assert tokens(llm, [PROMPT], SHORT) == expected.short


@pytest.mark.usefixtures("small_start")
@pytest.mark.parametrize(
    ("warm_up", "compiles"), [("warmup", "compile_steps"), ("begin_warmup", "compile_first_steps")]
)
def test_a_warm_up_allocates_all_and_compiles_for_that_alone(
    monkeypatch: pytest.MonkeyPatch, warm_up: str, compiles: str
) -> None:  # holds OG1
    compiled_for: list[set[int]] = []

    def compile_nothing(*_: object) -> int:
        compiled_for.append(pages_of(llm))
        return 0

    with make_llm() as llm:
        assert pages_of(llm) == {FIRST_PAGES}
        engine = llm.engine
        assert is_paged(engine)
        monkeypatch.setattr(PageMover, "compile", compile_nothing)
        monkeypatch.setattr(type(engine.executor), compiles, compile_nothing)
        getattr(engine, warm_up)()
        assert compiled_for == [{NUM_PAGES}] * 2
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
