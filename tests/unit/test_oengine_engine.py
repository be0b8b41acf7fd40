"""The paged engine gives the contiguous one's tokens: all page sizes, chunks, steps, prefix hits,
copies and preemptions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.config import make_config
from enginebay.errors import ConfigError, RequestError, UnsupportedError
from enginebay.outputs import RequestOutput
from enginebay_testing.driver import RequestDriver, request_of
from enginebay_testing.near_ties import MAX_NEAR_TIES, assert_same_tokens
from enginebay_testing.subject import EngineSubject, generate, greedy, penalty_params, seeded
from tests.brief import TINY
from tests.pool import EnginePool
from tests.unit import loops
from tests.unit.loops import Counts, Prefilled, seeing

pytestmark = pytest.mark.xdist_group("tiny")

SMALL = loops.PAGED
"""Options of most tests: too few pages for four long requests."""

KINDS: dict[str, SamplingParams] = {
    "greedy": greedy(20),
    "seeded": seeded(20),
    "penalised": penalty_params(20),
}


def prompts_with_common_beginnings(vocab_size: int, count: int, seed: int) -> list[list[int]]:
    """Ragged prompts of up to 150 tokens that begin like one of three; some end at the end of a
    page.
    """
    rng = np.random.default_rng(seed)
    begins = rng.integers(0, vocab_size, (3, 128))
    prompts = []
    for i in range(count):
        alike = int(rng.choice([0, 8, 16, 40, 64, 100, 128]))
        more = int(rng.choice([0, 0, 1, 5, 24])) or (0 if alike else 3)
        tail = rng.integers(0, vocab_size, more)
        prompts.append([int(t) for t in (*begins[i % 3][:alike], *tail)])
    return prompts


def make_llm(engine: str, options: dict[str, Any], **choices: Any) -> LLM:
    """The engine in the tests' sizes, warm, or in other sizes that compile what they need."""
    if not choices:
        return loops.make_llm(engine, **options)
    config = loops.tiny(engine, **options).model_dump()
    return LLM(config=make_config(config, {"forbid_compiling": False} | choices))


class Oracle:
    """The contiguous engine's tokens for a list of prompts, one after the other, by kind of
    sampling.
    """

    def __init__(self) -> None:
        self.subject = EngineSubject("vinference", model=TINY)
        with make_llm("vinference", {}) as llm:
            vocab_size = llm.plan.model.info.vocab_size
            self.prompts = prompts_with_common_beginnings(vocab_size, 14, seed=1)
            self.tokens = {
                kind: [generate(llm, [prompt], params)[0] for prompt in self.prompts]
                for kind, params in KINDS.items()
            }

    def check(self, llm: LLM, *kinds: str) -> None:
        for kind in kinds or KINDS:
            tokens = generate(llm, self.prompts, KINDS[kind])
            self.compare(self.prompts, self.tokens[kind], tokens, KINDS[kind])

    def compare(
        self,
        prompts: list[list[int]],
        first: list[list[int]],
        second: list[list[int]],
        params: SamplingParams,
    ) -> None:
        assert_same_tokens(self.subject.reference(), prompts, first, second, params)


@pytest.fixture(scope="module")
def oracle(engine_pool: EnginePool) -> Oracle:
    with engine_pool.leases():
        return Oracle()


@pytest.fixture
def make(engine_pool: EnginePool) -> Iterator[Callable[..., LLM]]:
    """Makes LLMs with the paged engine and these options of it; in the end nothing may be held."""
    made: list[LLM] = []

    def start(options: dict[str, Any], **choices: Any) -> LLM:
        made.append(make_llm("oengine", options, **choices))
        return made[-1]

    with engine_pool.leases():
        yield start
        for llm in made:
            assert_nothing_is_held(llm)
            llm.close()


def assert_nothing_is_held(llm: LLM) -> None:
    ledger = llm.engine.ledger
    llm.run_on_engine(ledger.check)
    assert ledger.groups["full"].store.pool.num_used == 0, "pages were leaked"
    assert llm.engine.rows.num_reqs == 0, "a row was leaked"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page_size", "layout"),
    [(8, "hnd"), (16, "nhd"), (24, "tpu_rpa"), (64, "hnd"), (64, "tpu_rpa"), (256, "hnd")],
)
def test_any_sizes_give_the_tokens_of_the_contiguous_engine(
    make: Callable[..., LLM], oracle: Oracle, page_size: int, layout: str
) -> None:
    rng = np.random.default_rng(page_size)
    options = {
        "page_size": page_size,
        "prefix_caching": bool(rng.integers(4)),
        "reserve_all": not rng.integers(3),
        "num_pages": int(rng.integers(2 + 192 // page_size, 4 + 800 // page_size)),
    }
    choices = {
        "max_num_batched_tokens": int(rng.choice([16, 33, 100, 512])),
        "decode_steps": int(rng.choice([1, 2, 5, 16])),
        "max_num_seqs": int(rng.choice([1, 3, 7])),
        "max_model_len": int(rng.choice([180, 200, 256])),
    }
    oracle.check(make(options, layout=layout, **choices))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_mixes_give_the_tokens_of_the_contiguous_engine(
    make: Callable[..., LLM], oracle: Oracle, seed: int
) -> None:
    """Ragged prompts of several completions, all kinds of sampling in one batch, twice: the second
    time beginnings are known.
    """
    rng = np.random.default_rng(seed)
    page_size = (8, 32, 128, 256)[seed]
    choices = {
        "max_num_batched_tokens": int(rng.choice([16, 48, 96])),
        "decode_steps": (1, 16)[seed % 2],
        "max_num_seqs": 4,
    }
    prompts = prompts_with_common_beginnings(oracle.subject.vocab_size, 16, seed=10 + seed)
    kinds = [
        greedy(40),
        seeded(40),
        penalty_params(40),
        SamplingParams(max_tokens=30, temperature=1.0, seed=3, n=3),
    ]
    params = [kinds[int(rng.integers(len(kinds)))] for _ in prompts]
    with make_llm("vinference", {}) as plain:
        expected = [[one.token_ids for one in o.outputs] for o in plain.generate(prompts, params)]
    llm = make({"page_size": page_size, "num_pages": 1 + max(2, 256 // page_size)}, **choices)
    counts = count(llm)
    for _ in range(2):
        outputs = [[one.token_ids for one in o.outputs] for o in llm.generate(prompts, params)]
        for kind in kinds:
            mine = [i for i, own in enumerate(params) if own is kind]
            oracle.compare(
                [prompts[i] for i in mine],
                [expected[i][0] for i in mine],
                [outputs[i][0] for i in mine],
                kind,
            )
        pairs = [
            pair
            for old, new in zip(expected, outputs, strict=True)
            for pair in zip(old, new, strict=True)
        ]
        assert sum(a != b for a, b in pairs) <= MAX_NEAR_TIES * len(pairs)
    assert counts.num_preempted or page_size == 256, (
        "two rows of one page each never need another one"
    )


def test_a_known_prompt_costs_its_last_token(make: Callable[..., LLM], oracle: Oracle) -> None:
    llm = make(SMALL)
    prompts = [[(7 * i + j) % 90 for j in range(40)] for i in range(3)]
    first = generate(llm, prompts, greedy(9))
    prefilled = Prefilled()
    with seeing(llm.engine, launch=prefilled):
        again = llm.generate(prompts, greedy(9))
    assert cached(again) == [39] * 3
    assert sum(prefilled.counts) == 3
    oracle.compare(prompts, first, [o.outputs[0].token_ids for o in again], greedy(9))
    prefilled.counts.clear()
    longer = [[*p, *o, 5, 6] for p, o in zip(prompts, first, strict=True)]
    with seeing(llm.engine, launch=prefilled):
        found = generate(llm, longer, seeded(9))
    assert sum(prefilled.counts) == 3 * 3, "40 tokens of a prompt and 8 of its output are 6 pages"
    llm.run_on_engine(llm.engine.drop_arrays)
    llm.run_on_engine(llm.engine.make_arrays)
    anew = llm.generate(longer, seeded(9))
    assert cached(anew) == [0] * 3
    oracle.compare(longer, [o.outputs[0].token_ids for o in anew], found, seeded(9))


def cached(outputs: list[RequestOutput]) -> list[int]:
    return [o.metrics.num_cached_tokens for o in outputs if o.metrics is not None]


def test_requests_that_begin_alike_share_pages_while_they_run(make: Callable[..., LLM]) -> None:
    llm = make(SMALL)
    begin = [i % 50 for i in range(64)]
    alone = generate(llm, [begin], greedy(10))[0]
    counts = count(llm)
    prompts = [begin, *([*begin, *(50 + i + j for j in range(5))] for i in range(3))]
    outputs = llm.generate(prompts, greedy(10))
    assert cached(outputs) == [63, 64, 64, 64]
    assert not counts.num_preempted, "four requests of ten pages have eight in common"
    assert outputs[0].outputs[0].token_ids == alone


@pytest.mark.slow
def test_without_prefix_caching_everything_is_computed(make: Callable[..., LLM]) -> None:
    llm, prefilled = make(SMALL | {"prefix_caching": False}), Prefilled()
    with seeing(llm.engine, launch=prefilled):
        for _ in range(2):
            assert cached(llm.generate([[1] * 40], greedy(2))) == [0]
    assert sum(prefilled.counts) == 80


@pytest.mark.slow
def test_dropped_arrays_take_the_prefixes_with_them(make: Callable[..., LLM]) -> None:
    llm = make(SMALL)
    before = generate(llm, [[1] * 40], greedy(4))
    llm.run_on_engine(llm.engine.drop_arrays)
    llm.run_on_engine(llm.engine.make_arrays)
    after = llm.generate([[1] * 40], greedy(4))
    assert cached(after) == [0]
    assert after[0].outputs[0].token_ids == before[0]


def count(llm: LLM) -> Counts:
    """Preemptions from now on."""
    counts = Counts()
    llm.loop.observers.add(counts)
    return counts


@pytest.mark.parametrize("caching", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_requests_preempted_in_the_middle_give_the_same_tokens(
    make: Callable[..., LLM], oracle: Oracle, caching: bool
) -> None:
    llm = make(SMALL | {"prefix_caching": caching})
    counts = count(llm)
    oracle.check(llm)
    assert counts.num_preempted


@pytest.mark.slow
def test_reserving_all_preempts_nobody(make: Callable[..., LLM], oracle: Oracle) -> None:
    llm = make(SMALL | {"reserve_all": True})
    counts = count(llm)
    oracle.check(llm, "greedy")
    assert not counts.num_preempted


@pytest.mark.slow
def test_state_of_a_row_can_be_put_where_its_prefix_is_shared(make: Callable[..., LLM]) -> None:
    prompt, params = [i % 80 for i in range(37)], seeded(16)
    llm = make(SMALL)
    expected = generate(llm, [prompt], params)[0]
    generate(llm, [prompt], greedy(2))

    def begin() -> tuple[Any, list[int]]:
        driver = RequestDriver(llm.engine, request_of(prompt, params))
        before = driver.prefill() + driver.decode(4)
        state = llm.engine.take(driver.lease)
        driver.close()
        return state, before

    def go_on(state: Any, before: list[int]) -> list[int]:
        driver = RequestDriver(llm.engine, request_of(prompt, params))
        assert driver.lease.num_cached == 32
        llm.engine.put(driver.lease, state)
        driver.resume(before)
        tokens = before + driver.decode(4) + driver.decode(4) + driver.decode(3)
        driver.close()
        return tokens

    state, before = llm.run_on_engine(begin)
    assert llm.run_on_engine(functools.partial(go_on, state, before)) == expected


@pytest.mark.slow
def test_pages_are_shared_and_copied_on_two_devices(
    make: Callable[..., LLM], oracle: Oracle
) -> None:
    if len(jax.devices()) < 2:
        pytest.skip(f"needs 2 devices, there are {len(jax.devices())}")
    llm = make({"page_size": 16}, mesh={"tensor": 2})
    for _ in range(2):
        oracle.check(llm, "greedy")


def test_nothing_compiles_after_warmup_whatever_is_found_or_copied(
    make: Callable[..., LLM],
) -> None:
    llm = make(SMALL)  # whose engine has compiled nothing but by warmup()
    assert llm.run_on_engine(lambda: llm.engine.compilations.forbidden)
    num_programs = llm.engine.compilations.count
    prompts = [[1] * 32, [1] * 32 + [2], [3] * 16, [1] * 40]
    for _ in range(2):
        assert {len(tokens) for tokens in generate(llm, prompts, greedy(20))} == {20}
    assert llm.engine.compilations.count == num_programs


def test_a_request_that_can_never_fit_is_refused_and_others_go_on(make: Callable[..., LLM]) -> None:
    llm = make(SMALL)
    with pytest.raises(
        RequestError, match=r"180 tokens and up to 13 new ones.*192 together.*more cache"
    ):
        llm.generate([[1] * 180], greedy(13))
    assert len(generate(llm, [[1] * 180], greedy(12))[0]) == 12


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (
            {"num_pages": 9, "cache_bytes": 9},
            ConfigError,
            "num_pages and cache_bytes cannot be combined",
        ),
        ({"page_size": 12}, ConfigError, "page_size = 12"),
        ({"page_size": 512}, ConfigError, "page_size = 512"),
        ({"cache_bytes": 4096}, ConfigError, "cache_bytes = 4096.*at least 8192"),
        ({"memory_utilization": 1e-9}, UnsupportedError, "memory_utilization = 1e-09 of .* MiB"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    make: Callable[..., LLM], options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        make({"page_size": 8} | options)


def test_the_cache_is_sized_by_pages_bytes_or_what_requests_need(make: Callable[..., LLM]) -> None:
    each = 2 * 2 * 2 * 16 * 8 * 4  # layers, keys and values, heads, width, tokens, f32
    for options, num_pages in (
        ({"num_pages": 77}, 77),
        ({"cache_bytes": 50 * each + 1}, 50),
        ({}, 1 + 4 * 256 // 8),
        ({"memory_utilization": 0.5}, 1 + 4 * 256 // 8),
    ):
        engine = make({"page_size": 8} | options, forbid_compiling=False).engine
        shape = engine.sizes.whole["full"]
        assert (shape.num_pages, engine.memory.cache_bytes) == (num_pages, num_pages * each)
        arrays = jax.tree.leaves(engine.executor.arrays().cache)
        assert sum(a.nbytes for a in arrays) == engine.memory.cache_bytes
