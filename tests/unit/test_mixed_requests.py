"""Mixed requests from threads and asyncio at once, on LLM and eSurge, with a pool of pages that is
too small for them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from enginebay import LLM, SamplingParams
from enginebay.serving.observer import Ending
from enginebay_esurge import eSurge
from tests.brief import BRIEF, LATE
from tests.fakes import SIZES
from tests.unit.esurge.small import OPTIONS
from tests.unit.loops import Counts
from tests.unit.serving import DEADLOCK_S

NUM_THREADS, NUM_TASKS, NUM_CASES, ROUNDS = 4, 8, 40, 3
NUM_PAGES, ABORTED = 33, 0.15
GROWTH_MIB = 8
"""What a process may grow by after the first round: allocators keep some of what they are given
back.
"""

Case = tuple[str, SamplingParams]
Found = list[tuple[str, list[int], str]]
"""Of each completion its reason, tokens and text."""


def make_cases() -> list[Case]:
    """Greedy and seeded requests of one to four completions, some with stop texts, some that begin
    alike.
    """
    chance = random.Random(0)
    cases = []
    for number in range(NUM_CASES):
        prompt = (
            chance.choice(["Once upon a time ", "The fox "])
            + "and so on " * chance.randrange(4)
            + str(number)
        )
        cases.append((
            prompt,
            SamplingParams(
                max_tokens=chance.randint(1, 60),
                temperature=chance.choice([0.0, 0.9]),
                seed=number,
                n=chance.choice([1, 1, 1, 2, 4]),
                stop=chance.choice([(), (), ("e",), ("the", "a")]),
                ignore_eos=chance.random() < 0.7,
            ),
        ))  # fmt: skip
    return cases


def make_engine(name: str, model: str) -> LLM | eSurge:
    """LLM or eSurge over the paged engine, with a pool of pages that few requests fill."""
    if name == "LLM":
        paged = {"name": "oengine", "page_size": 8, "num_pages": NUM_PAGES}
        sizes: Any = SIZES
        return LLM(model, processors=(), engine=paged, scheduler="priority", **sizes)
    few = OPTIONS | {"page_size": 8, "max_model_len": 240}
    few |= {"engine_options": {"num_pages": NUM_PAGES}, "processors": ()}
    return eSurge(model, scheduler="priority", **few)


@pytest.fixture(params=["LLM", "eSurge"])
def engine(request: pytest.FixtureRequest, faked: None) -> Iterator[LLM | eSurge]:
    """The engine that computes no model, under the real loop."""
    with make_engine(request.param, BRIEF) as made:
        yield made


@pytest.fixture(params=["LLM", "eSurge"])
def real_engine(request: pytest.FixtureRequest) -> Iterator[LLM | eSurge]:
    """The paged engine with a model whose greedy tokens vary; all its programs are compiled."""
    with make_engine(request.param, LATE) as made:
        made.run_on_engine(made.engine.warmup)  # eSurge would compile some programs meanwhile
        yield made


def found(outputs: Any) -> Found:
    return [(one.finish_reason, one.token_ids, one.text) for one in outputs]


def check_begins(seen: Found, expected: Found) -> None:
    """What was aborted begins like the whole."""
    for (_, tokens, _), (_, whole, _) in zip(seen, expected, strict=True):
        assert tokens == whole[: len(tokens)]


def run_one(engine: LLM | eSurge, case: Case, expected: Found, chance: random.Random) -> bool:
    """A request to its end or, of 15 in 100, a stream that is left after some of its updates: true
    if it was left.
    """
    prompt, params = case
    priority = chance.randrange(3)
    if chance.random() >= ABORTED:
        [output] = engine.generate(prompt, params, priority=priority)
        assert found(output.outputs) == expected
        return False
    stream = engine.stream(prompt, params, priority=priority)
    tokens: list[list[int]] = [[] for _ in range(params.n)]
    for _, part in zip(range(chance.randrange(4)), stream, strict=False):
        if isinstance(engine, LLM):
            tokens[part.index] += part.delta_token_ids
        else:
            tokens = [one.token_ids for one in part.outputs]
    stream.close()
    check_begins([("abort", ids, "") for ids in tokens], expected)
    return True


async def run_async(
    engine: LLM | eSurge, case: Case, expected: Found, chance: random.Random
) -> bool:
    """The same for asyncio, whose requests are cancelled; eSurge, which has no coroutines, is
    called in threads.
    """
    if isinstance(engine, eSurge):
        return await asyncio.to_thread(run_one, engine, case, expected, chance)
    call = asyncio.create_task(engine.agenerate(*case, priority=chance.randrange(3)))
    if chance.random() < ABORTED:
        await asyncio.sleep(chance.random() / 100)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        return True
    [output] = await call
    assert found(output.outputs) == expected
    return False


def run_round(
    engine: LLM | eSurge, cases: list[Case], whole: list[Found], count: int, seed: int
) -> int:
    """So many requests, a quarter of them from asyncio; the number of those that were left."""
    chances = [random.Random(1000 * seed + number) for number in range(count)]
    picks = [chance.randrange(len(cases)) for chance in chances]
    num_async = count // 4

    async def tasks() -> int:
        places = asyncio.Semaphore(NUM_TASKS)

        async def one(number: int) -> bool:
            async with places:
                pick = picks[number]
                return await run_async(engine, cases[pick], whole[pick], chances[number])

        return sum(await asyncio.gather(*map(one, range(num_async))))

    with ThreadPoolExecutor(NUM_THREADS + 1) as pool:
        running: list[Future[int]] = [pool.submit(asyncio.run, tasks())]
        for number in range(num_async, count):
            pick = picks[number]
            running.append(pool.submit(run_one, engine, cases[pick], whole[pick], chances[number]))
        return sum(one.result(4 * DEADLOCK_S) for one in running)


def resident_mib() -> float:
    """Memory of this process."""
    gc.collect()
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


@dataclasses.dataclass(frozen=True)
class Round:
    """Figures of one round; `abandoned` counts the requests that their callers left or
    cancelled.
    """

    seconds: float
    abandoned: int
    completions: int
    preemptions: int
    resident_mib: float


class Tally(Counts):
    """Counts preemptions and completions, and keeps nothing of them."""

    num_ended = 0

    def ended(self, ending: Ending) -> None:
        self.num_ended += 1


def check_mix(engine: LLM | eSurge, count: int) -> list[Round]:
    """Three rounds of so many requests, and the figures of each."""
    cases, tally, inner = make_cases(), Tally(), engine.engine
    whole = [found(engine.generate(*case)[0].outputs) for case in cases]
    observers = engine.loop.observers if isinstance(engine, LLM) else engine.audience
    observers.add(tally)
    rounds = []
    for seed in range(ROUNDS):
        tally.num_ended = tally.num_preempted = 0
        start = time.monotonic()
        abandoned = run_round(engine, cases, whole, count, seed)
        seconds = time.monotonic() - start
        engine.run_on_engine(inner.ledger.check)
        assert engine.run_on_engine(
            lambda: (inner.rows.num_reqs, inner.ledger.groups["full"].store.pool.num_used)
        ) == (0, 0)
        counted = (tally.num_ended, tally.num_preempted)
        rounds.append(Round(seconds, abandoned, *counted, resident_mib()))
        assert tally.num_preempted > 0, "the pool was large enough"
    return rounds


def check_many(engine: LLM | eSurge, count: int) -> None:
    """The same, whose figures are printed; resident memory may not grow after the first round."""
    rounds = check_mix(engine, count)
    print(*rounds, sep="\n")
    assert all(one.abandoned > count // 10 for one in rounds)
    sizes = [one.resident_mib for one in rounds]
    assert sizes[-1] - sizes[0] < GROWTH_MIB, sizes


@pytest.mark.long
def test_a_mix_of_requests_ends_right_and_leaves_nothing(engine: LLM | eSurge) -> None:
    check_mix(engine, 60)


@pytest.mark.slow
def test_a_mix_of_two_thousand_requests_ends_right_and_memory_is_flat(engine: LLM | eSurge) -> None:
    check_many(engine, 2000)


@pytest.mark.slow
def test_a_mix_of_two_thousand_requests_on_a_real_engine(real_engine: LLM | eSurge) -> None:
    num_programs = real_engine.engine.compilations.count
    check_many(real_engine, 2000)
    assert real_engine.engine.compilations.count == num_programs, "a request compiled a program"
