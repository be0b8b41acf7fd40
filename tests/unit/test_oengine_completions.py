"""Completions of one prompt on pages: it is computed once, whatever happens to the one that computes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from enginebay import LLM
from enginebay.build.compose import Composed
from enginebay.engine import StepPlan
from enginebay.errors import InternalError
from enginebay.loop.loop import EngineLoop
from enginebay.scheduler import Decision, Scheduler, SchedulerView
from enginebay.types import Request, SamplingParams
from enginebay_schedulers.fair import Fair
from enginebay_schedulers.fcfs import Fcfs
from enginebay_schedulers.prefix_aware import PrefixAware
from enginebay_schedulers.priority import Priority
from enginebay_schedulers.sjf import Sjf
from enginebay_schedulers.static_batch import StaticBatch
from tests.unit.paged import (
    Loops,
    all_tokens,
    count_prefilled,
    events,
    make_parts,
    request,
    running,
    tokens,
)

pytestmark = pytest.mark.xdist_group("oengine")

CACHING = (True, False)


@pytest.fixture(scope="module", params=CACHING, ids=("indexed", "not indexed"))
def parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Composed:
    return make_parts(tmp_path_factory.mktemp("tiny"), prefix_caching=request.param)


@pytest.fixture
def start(parts: Composed) -> Iterator[Loops]:
    """Starts loops, ends them, and looks at the books."""
    yield from running(parts)
    parts.engine.drop_arrays()  # the next test finds nothing of this one
    parts.engine.make_arrays()


def completions(
    name: str, length: int, max_tokens: int, n: int = 4, temperature: float = 0.9
) -> list[Request]:
    """The requests of one prompt."""
    one = request(name, length, max_tokens)
    sampling = dataclasses.replace(one.sampling, temperature=temperature)
    return [
        dataclasses.replace(one, request_id=f"{name}/{i}", parent_id=name, index=i, sampling=sampling)
        for i in range(n)
    ]


def by_themselves(loop: EngineLoop, family: list[Request]) -> list[list[int]]:
    """The tokens of each when it is alone and knows of no others."""
    return [tokens(loop.submit([dataclasses.replace(one, parent_id="")])[0]) for one in family]


@pytest.mark.parametrize("length", [1, 2, 20, 40, 77])
def test_a_prompt_is_computed_once_for_all_completions(
    start: Loops, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Of one token, in one chunk, to the end of a page, and in three chunks."""
    family = completions("prompt", length, 9)
    loop = start()
    counts = count_prefilled(loop.engine, monkeypatch)
    ends = [events(ticket) for ticket in loop.submit(family)]
    assert sum(counts) == length + 3
    assert [one[-1].metrics.num_cached_tokens for one in ends if one[-1].metrics] == [0, *[length - 1] * 3]
    got = [[token for event in one for token in event.token_ids] for one in ends]
    assert got == by_themselves(loop, family)
    assert len(set(map(tuple, got))) == 4, "completions with keys of their own are alike"


def test_greedy_completions_are_alike(start: Loops) -> None:
    family = completions("greedy", 50, 12, temperature=0.0)
    loop = start()
    got = all_tokens(loop.submit(family))
    assert got == [by_themselves(loop, family[:1])[0]] * 4


def test_what_is_shared_is_counted_once_in_the_cache(start: Loops, parts: Composed) -> None:
    """Four times 101 tokens would be 52 pages, of 24."""
    loop = start()
    most = 0
    step = loop.engine.step

    def watched(plan: StepPlan) -> Any:
        nonlocal most
        most = max(most, len(plan.rows) if plan.is_decode else 0)
        return step(plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.engine, "step", watched)
        assert [len(one) for one in all_tokens(loop.submit(completions("wide", 101, 12)))] == [12] * 4
    assert most == 4, f"{most} completions ran together"


@pytest.mark.parametrize("n", [3, 7])
def test_too_few_pages_and_rows_preempt_and_change_no_token(start: Loops, n: int) -> None:
    family = completions("long", 61, 100, n)
    others = completions("other", 30, 40, n)
    loop = start()
    tickets = loop.submit([one for pair in zip(family, others, strict=True) for one in pair])
    got = all_tokens(tickets)
    assert got[::2] == by_themselves(loop, family)
    assert got[1::2] == by_themselves(loop, others)


def act_on_first_chunk(loop: EngineLoop, act: Callable[[], None]) -> pytest.MonkeyPatch:
    """Have something done on the engine's thread while the first chunk of a prompt is launched."""
    step, done = loop.engine.step, False
    patch = pytest.MonkeyPatch()

    def acting(plan: StepPlan) -> Any:
        nonlocal done
        pending = step(plan)
        if not done:
            done = True
            act()
        return pending

    patch.setattr(loop.engine, "step", acting)
    return patch


def test_the_others_go_on_when_the_first_is_aborted_half_way(start: Loops) -> None:
    family = completions("orphans", 90, 10)
    loop = start()
    patch = act_on_first_chunk(loop, lambda: loop.abort("orphans/0"))
    tickets = loop.submit(family)
    assert events(tickets[0])[-1].finish_reason == "abort"
    got = all_tokens(tickets[1:])
    patch.undo()
    assert got == by_themselves(loop, family[1:])


def test_aborting_all_frees_everything(start: Loops) -> None:
    family = completions("gone", 90, 50)

    def abort_all() -> None:
        for one in family:
            loop.abort(one.request_id)

    loop = start()
    patch = act_on_first_chunk(loop, abort_all)
    assert {events(ticket)[-1].finish_reason for ticket in loop.submit(family)} == {"abort"}
    patch.undo()
    ledger: Any = loop.engine.ledger
    assert loop.call(lambda: ledger.store.pool.num_used) == 0


def test_a_step_that_fails_fails_those_that_run_and_the_others_begin_anew(start: Loops) -> None:
    family = completions("unlucky", 90, 10)

    def fail() -> None:
        raise RuntimeError("the device is gone")

    loop = start()
    patch = act_on_first_chunk(loop, fail)
    tickets = loop.submit(family)
    assert isinstance(events(tickets[0])[-1].error, InternalError)
    got = all_tokens(tickets[1:])
    patch.undo()
    assert got == by_themselves(loop, family[1:])


class Interferes(Scheduler):
    """Decides like another one, but preempts a request once, at its decision number `at`, before it decides."""

    def __init__(self, inner: Scheduler, name: str, at: int) -> None:
        self.inner, self.name, self.at = inner, name, at

    def initial_state(self) -> Any:
        return 0, self.inner.initial_state()

    def decide(self, view: SchedulerView, state: Any) -> tuple[Decision, Any]:
        number, inner = state
        if number == self.at and any(row.request_id == self.name for row in view.running):
            return Decision(preempt=(self.name,)), (number + 1, inner)
        decision, inner = self.inner.decide(view, inner)
        return decision, (number + 1, inner)


@pytest.mark.parametrize("at", [1, 2, 3, 5, 8])
def test_the_first_may_be_preempted_at_any_time(start: Loops, parts: Composed, at: int) -> None:
    family = completions("preempted", 70, 14)
    loop = start(Interferes(parts.scheduler, "preempted/0", at))
    got = all_tokens(loop.submit(family))
    loop.close()
    assert got == by_themselves(start(), family)


class NewcomersOnly(Scheduler):
    """Prefills who waits before who has begun, one at a time, and decodes only when there is neither."""

    def initial_state(self) -> None:
        return None

    def decide(self, view: SchedulerView, state: None) -> tuple[Decision, None]:
        begun = [row for row in view.running if row.num_left]
        for one in (*view.waiting[: view.limits.free_rows], *begun):
            return Decision(prefill=((one.request_id, min(one.num_left, 16)),)), None
        ready = tuple(row.request_id for row in view.running if row.max_new_left)
        return Decision(decode=ready), None


def test_a_scheduler_that_passes_over_the_first_cannot_stall_the_others(start: Loops) -> None:
    family = completions("ignored", 40, 5)
    loop = start(NewcomersOnly())
    got = all_tokens(loop.submit(family))
    loop.close()
    assert got == by_themselves(start(), family)


@pytest.mark.parametrize("scheduler", [Fair, Fcfs, PrefixAware, Priority, Sjf, StaticBatch])
def test_every_scheduler_has_prompts_computed_once(
    start: Loops, monkeypatch: pytest.MonkeyPatch, scheduler: type[Scheduler]
) -> None:
    loop = start(scheduler())
    counts = count_prefilled(loop.engine, monkeypatch)
    family, other = completions("four", 25, 6), completions("two", 14, 6, 2)
    assert {len(one) for one in all_tokens(loop.submit([*family, *other]))} == {6}
    assert sum(counts) == 25 + 3 + 14 + 1


def test_an_output_has_all_completions_and_their_sums(parts: Composed) -> None:
    config = parts.plan.config
    params = SamplingParams(n=3, max_tokens=20, temperature=1.0, seed=5, ignore_eos=True)
    with LLM(config=config) as llm:
        (output,) = llm.generate([[5] * 43], params)
        again = llm.generate([[5] * 43], params)[0]
    texts = [one.token_ids for one in output.outputs]
    assert [one.index for one in output.outputs] == [0, 1, 2]
    assert len(set(map(tuple, texts))) == 3
    assert texts == [one.token_ids for one in again.outputs]
    assert output.num_generated_tokens == 60
    assert {one.finish_reason for one in output.outputs} == {"length"}
