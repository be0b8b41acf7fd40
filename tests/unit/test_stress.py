"""Everything at once on a pool that is too small: threads, streams, aborts, stop texts,
completions, failures, no compilation.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.contracts.cache import Lease
from enginebay.contracts.engine import StepPlan
from enginebay.errors import InternalError, RequestError
from enginebay.outputs import RequestOutput
from enginebay_testing.near_ties import MAX_NEAR_TIES, possible_tokens
from enginebay_testing.reference import ReferenceModel
from tests.unit.loops import NUM_PAGES, PAGE_SIZE, PAGED, Counts, make_llm, seeing
from tests.unit.serving import DEADLOCK_S

ROOM = (NUM_PAGES - 1) * PAGE_SIZE
"""Tokens that a request can have when it is alone."""

NUM_THREADS = 6
VOCAB_SIZE = 96
TOO_LONG = 186


@dataclasses.dataclass(frozen=True)
class Case:
    """A prompt and how it is sampled; `expected` are the tokens of each completion on the
    contiguous engine.
    """

    prompt: list[int]
    params: SamplingParams
    expected: list[list[int]]


def make_params(chance: random.Random, room: int) -> SamplingParams:
    """Greedy, sampled or penalised, with and without stop texts and several completions."""
    penalised = chance.random() < 0.15
    return SamplingParams(
        max_tokens=chance.randint(1, min(60, room)),
        temperature=chance.choice([0.0, 0.0, 0.9]),
        top_k=chance.choice([0, 40]),
        top_p=chance.choice([1.0, 0.95]),
        seed=chance.randrange(1000),
        n=chance.choice([1, 1, 1, 2, 5]),
        stop=chance.choice([(), (), (f"w{chance.randrange(VOCAB_SIZE)} ", "w5 w")]),
        ignore_eos=chance.random() < 0.7,
        presence_penalty=0.7 if penalised else 0.0,
        repetition_penalty=1.4 if penalised else 1.0,
    )


def make_cases(count: int, seed: int) -> list[Case]:
    """Random ones, of which half begin like another, and their tokens."""
    chance, rng = random.Random(seed), np.random.default_rng(seed)
    begins = rng.integers(0, VOCAB_SIZE, (4, 128)).tolist()
    todo = []
    for _ in range(count):
        alike = chance.choice([0, 0, 0, 8, 20, 64, 96])
        tail = rng.integers(0, VOCAB_SIZE, chance.choice([1, 3, 17, 40])).tolist()
        prompt = begins[chance.randrange(4)][:alike] + tail
        todo.append((prompt, make_params(chance, ROOM - len(prompt))))
    with make_llm("vinference") as llm:
        outputs = llm.generate([prompt for prompt, _ in todo], [params for _, params in todo])
    return [
        Case(prompt, params, [one.token_ids for one in output.outputs])
        for (prompt, params), output in zip(todo, outputs, strict=True)
    ]


class Fails:
    """Looks at the engine's steps, and makes some fail by their numbers: every other one of these
    not before it is read.
    """

    def __init__(self, llm: LLM, numbers: Sequence[int]) -> None:
        self.numbers = list(numbers)
        self.num_steps = 0
        self._llm = llm
        self._doomed: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> None:
        """To be called with each step before it is launched."""
        self.num_steps += 1
        if self.num_steps % 50 == 0:
            self._llm.engine.ledger.check()
        if self.num_steps in self.numbers:
            if self.numbers.index(self.num_steps) % 2:
                self._doomed.append(plan)
                return
            raise RuntimeError("a step is to fail")

    def read(self, plan: StepPlan) -> None:
        """To be called with each step before its tokens are read."""
        if any(plan is doomed for doomed in self._doomed):
            raise RuntimeError("a step is to fail")


class Clients:
    """Callers in several threads, each of which takes the next case and does something with it."""

    def __init__(self, llm: LLM, cases: Sequence[Case], count: int, seed: int) -> None:
        self.llm = llm
        self.cases = cases
        self.seed = seed
        self.seen: list[tuple[Case, int, list[int], bool]] = []
        """Case, completion, its tokens, and whether that is all of them."""
        self.counts: collections.Counter[str] = collections.Counter()
        self._left = iter(range(count))
        self._lock = threading.Lock()
        self._ways: tuple[Callable[[random.Random], None], ...] = (
            self.generate,
            self.generate,
            self.agenerate,
            self.stream,
            self.leave_a_stream,
            self.abort_some,
        )

    def run(self) -> None:
        """All of them to their end; raises what one of them met that it should not."""
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            for done in [pool.submit(self._work) for _ in range(NUM_THREADS)]:
                done.result(4 * DEADLOCK_S)

    def _work(self) -> None:
        while True:
            with self._lock:
                number = next(self._left, None)
            if number is None:
                return
            chance = random.Random(1000 * self.seed + number)
            way = chance.choice(self._ways)
            try:
                way(chance)
            except InternalError as error:
                if "is to fail" not in str(error):
                    raise
                self._count("failed")
            except RequestError as error:
                if "which is the size of the whole cache" not in str(error):
                    raise
                self._count("refused")

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def _saw(self, case: Case, index: int, token_ids: list[int], *, whole: bool) -> None:
        with self._lock:
            self.seen.append((case, index, token_ids, whole))

    def _saw_outputs(self, cases: Sequence[Case], outputs: Sequence[RequestOutput]) -> None:
        for case, output in zip(cases, outputs, strict=True):
            assert output.num_generated_tokens == sum(len(one.token_ids) for one in output.outputs)
            for one in output.outputs:
                self._saw(case, one.index, one.token_ids, whole=True)

    def generate(self, chance: random.Random) -> None:
        """One to three prompts; one in ten asks for more than there is."""
        self._count("generate")
        cases = chance.choices(self.cases, k=chance.choice([1, 1, 3]))
        if chance.random() < 0.1:
            self.llm.generate([1] * TOO_LONG, SamplingParams(max_tokens=20))
        self._saw_outputs(
            cases, self.llm.generate([c.prompt for c in cases], [c.params for c in cases])
        )

    def agenerate(self, chance: random.Random) -> None:
        """The same for asyncio."""
        self._count("agenerate")
        cases = chance.choices(self.cases, k=2)
        outputs = asyncio.run(
            self.llm.agenerate([c.prompt for c in cases], [c.params for c in cases])
        )
        self._saw_outputs(cases, outputs)

    def stream(self, chance: random.Random) -> None:
        """Chunk by chunk, to the end."""
        self._count("stream")
        self._read(chance.choice(self.cases), None)

    def leave_a_stream(self, chance: random.Random) -> None:
        """Some chunks, and then no more; or not even one."""
        self._count("leave_a_stream")
        self._read(chance.choice(self.cases), chance.randrange(6))

    def _read(self, case: Case, most: int | None) -> None:
        found: dict[int, list[int]] = collections.defaultdict(list)
        ended: set[int] = set()
        chunks = self.llm.stream(case.prompt, case.params)
        for chunk in itertools.islice(chunks, most):
            found[chunk.index] += chunk.delta_token_ids
            if chunk.finish_reason is not None:
                ended.add(chunk.index)
        for index, token_ids in found.items():
            self._saw(case, index, token_ids, whole=index in ended)
        assert most is not None or len(ended) == case.params.n

    def abort_some(self, chance: random.Random) -> None:
        """Completions are aborted one by one at random moments, and the others go on."""
        self._count("abort_some")
        case = chance.choice(self.cases)
        doomed = {index for index in range(case.params.n) if chance.random() < 0.6}
        left = list(doomed)
        found: dict[int, list[int]] = collections.defaultdict(list)
        reasons: dict[int, str] = {}
        for chunk in self.llm.stream(case.prompt, case.params):
            found[chunk.index] += chunk.delta_token_ids
            if chunk.finish_reason is not None:
                reasons[chunk.index] = chunk.finish_reason
            if left and chance.random() < 0.5:
                self.llm.loop.abort(f"{chunk.request_id}/{left.pop()}")
        assert len(reasons) == case.params.n
        assert {index for index, reason in reasons.items() if reason == "abort"} <= doomed
        for index, reason in reasons.items():
            self._count("aborted" if reason == "abort" else "ended")
            self._saw(case, index, found[index], whole=reason != "abort")


def check_tokens(
    seen: Sequence[tuple[Case, int, list[int], bool]], reference: ReferenceModel | None
) -> None:
    """Whole ones are those of the contiguous engine, others begin like them; near-ties are few."""
    different: set[tuple[int, int, tuple[int, ...]]] = set()
    for case, index, found, whole in seen:
        expected = case.expected[index]
        if found == (expected if whole else expected[: len(found)]):
            continue
        assert reference is not None, f"{found} instead of {expected}: {case.params}"
        pairs = enumerate(itertools.zip_longest(found, expected, fillvalue=-1))
        at = next(i for i, (a, b) in pairs if a != b)
        assert at < min(len(found), len(expected)), (
            f"{len(found)} of {len(expected)} tokens: {case.params}"
        )
        known = (id(case), index, tuple(found[: at + 1]))
        if known not in different:
            different.add(known)
            tie = possible_tokens(reference, case.prompt, case.params, found[:at], index)
            assert {found[at], expected[at]} <= tie, (
                f"token {at} of {case.params} is wrong, and no near-tie"
            )
    assert len(different) <= MAX_NEAR_TIES * len({(id(c), i) for c, i, _, _ in seen})


def check_all_is_given_back(llm: LLM) -> None:
    """Whoever has left did so before this call: it comes after the aborts."""
    llm.run_on_engine(llm.engine.ledger.check)
    pool = llm.engine.ledger.groups["full"].store.pool
    assert (pool.num_used, pool.num_free + pool.num_cached) == (0, NUM_PAGES - 1)
    assert (llm.engine.rows.num_reqs, llm.loop.num_waiting, llm.loop.num_running) == (0, 0, 0)


def run_stress(llm: LLM, cases: Sequence[Case], count: int, fail_at: Sequence[int]) -> Clients:
    """So many calls of random kinds; steps of these numbers fail. Checks all but the tokens."""
    num_programs = llm.engine.compilations.count
    clients, counts, fails = Clients(llm, cases, count, seed=count), Counts(), Fails(llm, fail_at)
    forks = Forks(llm)
    llm.loop.observers.add(counts)
    with seeing(llm.engine, fails.launch, fails.read), forks.counted():
        clients.run()
    with pytest.raises(RequestError, match="the size of the whole cache"):
        llm.generate([1] * TOO_LONG, SamplingParams(max_tokens=20))
    check_all_is_given_back(llm)
    assert fails.num_steps > max(fail_at), f"{fails.num_steps} steps: too few to fail at {fail_at}"
    assert 0 < clients.counts["failed"] < count // 10, (
        "only requests of the steps that fail are failed"
    )
    assert llm.engine.compilations.count == num_programs
    assert min(counts.num_preempted, forks.count) > count // 20, "too little happened"
    assert clients.counts["aborted"] > count // 50, "too few were aborted while they ran"
    return clients


class Forks:
    """Counts how often the ledger has forked a lease."""

    def __init__(self, llm: LLM) -> None:
        self.count = 0
        self._ledger = llm.engine.ledger
        self._fork = self._ledger.fork

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """While the block lasts."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._ledger, "fork", self._forked)
            yield

    def _forked(self, lease: Lease, row: int, num_cached: int, num_tokens: int) -> Lease | None:
        self.count += 1
        forked: Lease | None = self._fork(lease, row, num_cached, num_tokens)
        return forked


CACHING: dict[str, dict[str, Any]] = {
    "indexed": {"prefix_caching": True},
    "not indexed": {"prefix_caching": False},
    "host tier": {"prefix_caching": True, "prefix_host_bytes": 2**20},
}


@pytest.mark.long
@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize("caching", CACHING)
def test_everything_at_once(caching: str) -> None:
    cases = make_cases(60, seed=1)
    with make_llm("oengine", **(PAGED | CACHING[caching])) as llm:
        clients = run_stress(llm, cases, count=300, fail_at=(100, 500, 800))
    check_tokens(clients.seen, None)


def run_on_real_engine(
    num_cases: int, count: int, fail_at: Sequence[int], caching: str = "indexed"
) -> None:
    """On the paged engine, whose tokens are compared with the contiguous engine's."""
    cases = make_cases(num_cases, seed=count)
    with make_llm("oengine", **(PAGED | CACHING[caching])) as llm:
        clients = run_stress(llm, cases, count, fail_at)
        check_tokens(clients.seen, ReferenceModel(llm.plan, llm.engine.executor.weights()))


@pytest.mark.long
@pytest.mark.usefixtures("pooled")
@pytest.mark.xdist_group("tiny")
def test_everything_at_once_on_a_real_engine() -> None:
    run_on_real_engine(num_cases=20, count=90, fail_at=(40, 150))


@pytest.mark.slow
@pytest.mark.xdist_group("tiny")
@pytest.mark.usefixtures("pooled")
@pytest.mark.parametrize("caching", CACHING)
def test_two_thousand_requests(caching: str) -> None:
    run_on_real_engine(150, 1300, (100, 2000, 3000, 4000), caching)
