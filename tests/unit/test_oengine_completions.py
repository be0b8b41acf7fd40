"""Completions of one prompt on pages: it is computed once, whatever happens to the one that
computes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from enginebay.compose.composition import Composed
from enginebay.contracts.engine import StepPlan
from enginebay.contracts.scheduler import Decision, Scheduler, SchedulerView
from enginebay.errors import InternalError
from enginebay.types import Request, SamplingParams
from enginebay_schedulers.fair import Fair
from enginebay_schedulers.fcfs import Fcfs
from enginebay_schedulers.prefix_aware import PrefixAware
from enginebay_schedulers.priority import Priority
from enginebay_schedulers.sjf import Sjf
from enginebay_schedulers.static_batch import StaticBatch
from tests.fake_engine import FakeEngine
from tests.fakes import expected_tokens
from tests.pool import EnginePool
from tests.unit.loops import (
    PAGED,
    Counts,
    FailsOnce,
    Loops,
    Once,
    Prefilled,
    all_tokens,
    alone,
    composed,
    events,
    family,
    fresh,
    held,
    make_llm,
    running,
    seeing,
)

FAKES = (("fake", "caching"), ("fake", "forgetful"))
"""Engine, and whether it keeps prefixes."""


def for_each(name: str, values: Iterable[int], *real: int) -> pytest.MarkDecorator:
    """Each value on both fake engines, and some on the real one."""
    cases = [
        pytest.param(fake, value, id=f"{' '.join(fake)} {value}")
        for fake in FAKES
        for value in values
    ]
    tiny = pytest.mark.xdist_group("tiny")
    cases += [
        pytest.param(("real", "caching"), value, id=f"real {value}", marks=tiny) for value in real
    ]
    return pytest.mark.parametrize(("parts", name), cases, indirect=["parts"])


@pytest.fixture(params=FAKES, ids=" ".join)
def parts(request: pytest.FixtureRequest, engine_pool: EnginePool) -> Iterator[Composed]:
    kind, caching = request.param
    options = PAGED | {"prefix_caching": caching == "caching"}
    with composed(engine_pool, kind, "oengine", **options) as made:
        yield made


@pytest.fixture
def start(parts: Composed) -> Iterator[Loops]:
    """Starts loops, ends them, and looks at the books."""
    yield from running(parts)


def by_themselves(parts: Composed, requests: list[Request]) -> list[list[int]]:
    """The tokens of each when it is alone and knows of no others."""
    if isinstance(parts.engine, FakeEngine):
        return [expected_tokens(one) for one in requests]
    found = alone(parts, requests)
    fresh(parts)
    return found


@for_each("length", (1, 2, 20, 40, 77), 20, 77)
def test_a_prompt_is_computed_once_for_all_completions(
    start: Loops, parts: Composed, length: int
) -> None:
    """Of one token, in one chunk, to the end of a page, and in three chunks."""
    requests, prefilled = family("prompt", length, 9), Prefilled()
    expected = by_themselves(parts, requests)
    loop = start()
    with seeing(loop.engine, launch=prefilled):
        ends = [events(ticket) for ticket in loop.submit(requests)]
    assert sum(prefilled.counts) == length + 3
    assert [one[-1].metrics.num_cached_tokens for one in ends if one[-1].metrics] == [
        0,
        *[length - 1] * 3,
    ]
    got = [[token for event in one for token in event.token_ids] for one in ends]
    assert got == expected
    assert len(set(map(tuple, got))) == 4, "completions with keys of their own are alike"


def test_greedy_completions_are_alike(start: Loops) -> None:
    requests = family("greedy", 50, 12, temperature=0.0)
    assert all_tokens(start().submit(requests)) == [expected_tokens(requests[0])] * 4


def test_what_is_shared_is_counted_once_in_the_cache(start: Loops) -> None:
    """Four times 101 tokens would be 52 pages, of 24."""
    loop, most = start(), 0

    def look(plan: StepPlan) -> None:
        nonlocal most
        most = max(most, len(plan.rows) if plan.is_decode else 0)

    with seeing(loop.engine, launch=look):
        assert [len(one) for one in all_tokens(loop.submit(family("full_vocab", 101, 12)))] == [
            12
        ] * 4
    assert most == 4, f"{most} completions ran together"


@for_each("n", (3, 7), 3, 7)
def test_too_few_pages_and_rows_preempt_and_change_no_token(
    start: Loops, parts: Composed, n: int
) -> None:
    requests = [*family("long", 61, 100, n), *family("other", 30, 40, n)]
    expected, counts = by_themselves(parts, requests), Counts()
    loop = start()
    loop.observers.add(counts)
    order = [place for pair in zip(range(n), range(n, 2 * n), strict=True) for place in pair]
    got = all_tokens(loop.submit([requests[place] for place in order]))
    assert got == [expected[place] for place in order]
    assert counts.num_preempted


def test_the_others_go_on_when_the_first_is_aborted_half_way(start: Loops) -> None:
    requests = family("orphans", 90, 10)
    loop = start()
    with seeing(loop.engine, launch=Once(lambda: loop.abort("orphans/0"))):
        tickets = loop.submit(requests)
        assert events(tickets[0])[-1].finish_reason == "abort"
        assert all_tokens(tickets[1:]) == [expected_tokens(one) for one in requests[1:]]


def test_aborting_all_frees_everything(start: Loops) -> None:
    requests = family("gone", 90, 50)
    loop = start()

    def abort_all() -> None:
        for one in requests:
            loop.abort(one.request_id)

    with seeing(loop.engine, launch=Once(abort_all)):
        assert {events(ticket)[-1].finish_reason for ticket in loop.submit(requests)} == {"abort"}
    loop.call(start.check)


@pytest.mark.parametrize("when", ["launch", "read"])
def test_a_step_that_fails_fails_those_that_run_and_the_others_begin_anew(
    start: Loops, when: str
) -> None:
    requests = family("unlucky", 90, 10)
    loop = start()
    with seeing(loop.engine, **{when: FailsOnce(lambda plan: not plan.is_decode)}):
        with held(loop):
            tickets = loop.submit(requests)
        assert isinstance(events(tickets[0])[-1].error, InternalError)
        assert all_tokens(tickets[1:]) == [expected_tokens(one) for one in requests[1:]]


class Interferes(Scheduler):
    """Decides like another one, but preempts a request once, at its decision number `at`, before it
    decides.
    """

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


@for_each("at", (1, 2, 3, 5, 8), 2, 5)
def test_the_first_may_be_preempted_at_any_time(start: Loops, parts: Composed, at: int) -> None:
    requests, counts = family("preempted", 70, 24), Counts()
    expected = by_themselves(parts, requests)
    loop = start(Interferes(parts.scheduler, "preempted/0", at))
    loop.observers.add(counts)
    assert all_tokens(loop.submit(requests)) == expected
    assert counts.num_preempted


class NewcomersOnly(Scheduler):
    """Prefills who waits before who has begun, one at a time, and decodes only when there is
    neither.
    """

    def initial_state(self) -> None:
        return None

    def decide(self, view: SchedulerView, state: None) -> tuple[Decision, None]:
        begun = [row for row in view.running if row.num_left]
        for one in (*view.waiting[: view.limits.free_rows], *begun):
            return Decision(prefill=((one.request_id, min(one.num_left, 16)),)), None
        ready = tuple(row.request_id for row in view.running if row.max_new_left)
        return Decision(decode=ready), None


def test_a_scheduler_that_passes_over_the_first_cannot_stall_the_others(start: Loops) -> None:
    requests = family("ignored", 40, 5)
    assert all_tokens(start(NewcomersOnly()).submit(requests)) == [
        expected_tokens(one) for one in requests
    ]


@pytest.mark.parametrize("scheduler", [Fair, Fcfs, PrefixAware, Priority, Sjf, StaticBatch])
def test_every_scheduler_has_prompts_computed_once(
    start: Loops, scheduler: type[Scheduler]
) -> None:
    loop, prefilled = start(scheduler()), Prefilled()
    requests = [*family("four", 25, 6), *family("two", 14, 6, 2)]
    with seeing(loop.engine, launch=prefilled):
        assert all_tokens(loop.submit(requests)) == [expected_tokens(one) for one in requests]
    assert sum(prefilled.counts) == 25 + 3 + 14 + 1


@pytest.mark.parametrize(
    ("fixture", "keeps"),
    [
        ("faked", True),
        ("faked", False),
        pytest.param("pooled", True, marks=pytest.mark.xdist_group("tiny")),
    ],
)
def test_an_output_has_all_completions_and_their_sums(
    request: pytest.FixtureRequest, fixture: str, *, keeps: bool
) -> None:
    request.getfixturevalue(fixture)
    params = SamplingParams(n=3, max_tokens=20, temperature=1.0, seed=5, ignore_eos=True)
    with make_llm("oengine", **(PAGED | {"prefix_caching": keeps})) as llm:
        (output,) = llm.generate([[5] * 43], params)
        again = llm.generate([[5] * 43], params)[0]
    texts = [one.token_ids for one in output.outputs]
    assert [one.index for one in output.outputs] == [0, 1, 2]
    assert len(set(map(tuple, texts))) == 3
    assert texts == [one.token_ids for one in again.outputs]
    assert output.num_generated_tokens == 60
    assert {one.finish_reason for one in output.outputs} == {"length"}
