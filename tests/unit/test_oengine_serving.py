"""The serving loop on a pool of pages that is too small: aborts, failures and stubborn schedulers leak and stall nothing."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from enginebay.build.compose import Composed
from enginebay.engine import StepPlan
from enginebay.errors import InternalError, RequestError
from enginebay.loop.loop import MAX_IN_FLIGHT, EngineLoop
from enginebay.loop.messages import Ticket
from enginebay.scheduler import Decision, Scheduler, SchedulerView
from tests.unit.paged import DEADLOCK_S, Loops, all_tokens, events, make_parts, request, running, tokens

pytestmark = pytest.mark.xdist_group("oengine")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Composed:
    return make_parts(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def start(parts: Composed) -> Iterator[Loops]:
    """Starts loops, ends them, and looks at the books."""
    yield from running(parts)


class NeverPreempts(Scheduler):
    """Decides like another one, but takes nobody's row away.

    Instead it runs the rows that have cache for their next token, if there are any, or (`insists`) those that have none.
    """

    def __init__(self, inner: Scheduler, *, insists: bool) -> None:
        self.inner, self.insists = inner, insists

    def initial_state(self) -> Any:
        return self.inner.initial_state()

    def decide(self, view: SchedulerView, state: Any) -> tuple[Decision, Any]:
        decision, state = self.inner.decide(view, state)
        if not decision.preempt:
            return decision, state
        if self.insists:
            return dataclasses.replace(decision, preempt=()), state
        able = [r for r in view.running if not r.num_left and r.num_tokens <= (r.num_promised or 0)]
        return Decision(decode=tuple(row.request_id for row in able if row.max_new_left)), state


@pytest.mark.parametrize("insists", [False, True])
def test_a_scheduler_that_never_preempts_cannot_stall_the_loop(
    start: Callable[..., EngineLoop], parts: Composed, insists: bool
) -> None:
    requests = [request(f"r{i}", 30 + i, 60) for i in range(6)]
    loop = start(NeverPreempts(parts.scheduler, insists=insists))
    got = [tokens(ticket) for ticket in loop.submit(requests)]
    assert [len(one) for one in got] == [60] * 6
    loop.close()
    assert got == [tokens(start().submit([one])[0]) for one in requests]


def test_aborting_frees_pages_before_the_next_step(start: Callable[..., EngineLoop]) -> None:
    loop = start()
    tickets = loop.submit([request(f"long {i}", 10 + i, 150) for i in range(3)])
    assert tickets[0].get(DEADLOCK_S).token_ids
    for i in range(3):
        loop.abort(f"long {i}")
    used = loop.call(lambda: loop.engine.ledger.store.pool.num_used)  # type: ignore[attr-defined]
    assert used == 0
    assert {events(ticket)[-1].finish_reason for ticket in tickets} == {"abort"}


def test_a_request_that_can_never_fit_does_not_wait(start: Callable[..., EngineLoop]) -> None:
    loop = start()
    never, fits = loop.submit([request("never", 100, 100), request("fits", 100, 5)])
    (last,) = events(never)
    assert last.finish_reason == "error"
    assert isinstance(last.error, RequestError)
    assert len(tokens(fits)) == 5


def test_what_a_failed_step_computed_is_not_found_again(
    start: Callable[..., EngineLoop], parts: Composed, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = start()
    expected = tokens(loop.submit([request("first", 40, 12)])[0])
    step = loop.engine.step

    def fail(plan: StepPlan) -> Any:
        if plan.is_decode:
            raise RuntimeError("the device is gone")
        return step(plan)

    with monkeypatch.context() as patch:
        patch.setattr(loop.engine, "step", fail)
        assert isinstance(events(loop.submit([request("unlucky", 40, 12)])[0])[-1].error, InternalError)
    after = loop.submit([request("after", 40, 12)])[0]
    last = events(after)
    assert [token for event in last for token in event.token_ids] == expected
    assert last[-1].metrics is not None
    assert last[-1].metrics.num_cached_tokens == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_row_table_has_the_pages_of_each_row(
    start: Callable[..., EngineLoop], monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """While rows grow, share pages, are preempted and end; a row that is free has none."""
    loop, seen = start(overlap_execution=overlap), 0
    step, table = loop.engine.step, loop.engine.rows.page_tables[0]

    def watched(plan: StepPlan) -> Any:
        nonlocal seen
        for row in plan.rows:
            num_pages = int(table.num_pages[row.row])
            assert tuple(table.page_ids[row.row, :num_pages].tolist()) == row.lease.pages
            assert not table.page_ids[row.row, num_pages:].any()
            seen = max(seen, num_pages)
        return step(plan)

    monkeypatch.setattr(loop.engine, "step", watched)
    requests = [request(f"r{i}", 30 + i, 60) for i in range(6)]
    requests += [dataclasses.replace(request(f"c{i}", 21, 9), parent_id="c", index=i) for i in range(3)]
    assert [len(one) for one in all_tokens(loop.submit(requests))] == [60] * 6 + [9] * 3
    assert seen == 12
    assert not loop.call(lambda: table.num_pages.any() or table.page_ids.any())


class FailsOnce:
    """An engine's step that fails when it is read, the first time that `fails` says so; `meanwhile` is called before."""

    def __init__(self, step: Callable[[StepPlan], Any], fails: Callable[[StepPlan], bool]) -> None:
        self.step, self.fails = step, fails
        self.meanwhile: Callable[[], None] = lambda: None
        self.has_failed = False

    def __call__(self, plan: StepPlan) -> Any:
        pending = self.step(plan)
        if not self.has_failed and self.fails(plan):
            self.meanwhile()
            pending.read = self._fail
        return pending

    def _fail(self) -> np.ndarray:
        self.has_failed = True
        raise RuntimeError("the device is gone")


def test_a_step_that_nobody_needs_any_more_fails_nobody(
    start: Callable[..., EngineLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its rows were aborted before it was read. Who came meanwhile has the row of one, and begins again."""
    loop = start()
    expected = tokens(loop.submit([request("after", 40, 12)])[0])
    failing = FailsOnce(loop.engine.step, lambda plan: plan.is_decode)
    came: list[Ticket] = []

    def meanwhile() -> None:
        loop.abort("aborted")
        came.extend(loop.submit([request("after", 40, 12)]))

    failing.meanwhile = meanwhile
    monkeypatch.setattr(loop.engine, "step", failing)
    assert events(loop.submit([request("aborted", 30, 50)])[0])[-1].finish_reason == "abort"
    assert tokens(came[0]) == expected
    assert failing.has_failed


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_that_fails_fails_its_own_requests_alone(
    start: Callable[..., EngineLoop], monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """Others lose what they had in the arrays, are computed again, and get the same tokens."""
    loop = start(overlap_execution=overlap)
    names = [f"lucky {i}" for i in range(3)]
    expected = all_tokens(loop.submit([request(name, 20 + i, 40) for i, name in enumerate(names)]))

    def is_the_unlucky_ones(plan: StepPlan) -> bool:
        rows = loop.engine.rows
        return not plan.is_decode and any(rows.request(r.row).request_id == "unlucky" for r in plan.rows)

    failing = FailsOnce(loop.engine.step, is_the_unlucky_ones)
    monkeypatch.setattr(loop.engine, "step", failing)
    lucky = loop.submit([request(name, 20 + i, 40) for i, name in enumerate(names)])
    first = [ticket.get(DEADLOCK_S) for ticket in lucky]
    unlucky = loop.submit([request("unlucky", 30, 5)])[0]
    error = events(unlucky)[-1].error
    assert isinstance(error, InternalError)
    assert "the device is gone" in str(error)
    got = [[*one.token_ids, *tokens(ticket)] for one, ticket in zip(first, lucky, strict=True)]
    assert got == expected


def test_steps_are_read_as_fast_as_they_are_launched(
    start: Callable[..., EngineLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while every decision launches a prefill and a decode: tokens come when they are there, not many steps later."""
    loop, most = start(), 0
    step = loop.engine.step

    def watched(plan: StepPlan) -> Any:
        nonlocal most
        most = max(most, len(loop._steps.in_flight))
        return step(plan)

    monkeypatch.setattr(loop.engine, "step", watched)
    tickets = loop.submit([request(f"r{i}", 60 + i, 3 + i % 5) for i in range(24)])
    assert [len(tokens(ticket)) for ticket in tickets] == [3 + i % 5 for i in range(24)]
    assert most <= MAX_IN_FLIGHT, f"{most} steps were launched and not read when another one was"


def test_without_overlap_each_step_is_read_before_the_next_is_launched(
    start: Callable[..., EngineLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one decision launches several: prompts with several completions, and decoding rows beside them."""
    requests = [request(f"r{i}", 60 + i, 3 + i % 5) for i in range(8)]
    requests += [
        dataclasses.replace(request(f"{p}/{i}", 20 + p, 6), parent_id=str(p), index=i)
        for p in range(3)
        for i in range(3)
    ]
    with_overlap = all_tokens(start().submit(requests))
    loop = start(overlap_execution=False)
    unread: list[Any] = []
    step = loop.engine.step

    def watched(plan: StepPlan) -> Any:
        assert not unread, "a step is launched before the one before it was read"
        pending = step(plan)
        read = pending.read
        unread.append(pending)

        def told() -> np.ndarray:
            unread.clear()
            return read()

        monkeypatch.setattr(pending, "read", told)
        return pending

    with monkeypatch.context() as patch:
        patch.setattr(loop.engine, "step", watched)
        assert all_tokens(loop.submit(requests)) == with_overlap


def run_with_random_aborts(loop: EngineLoop, count: int, seed: int) -> None:
    """Requests of random lengths, of which a third is aborted at a random moment; all end as they should."""
    chance = random.Random(seed)
    requests = [request(f"{seed}/{i}", chance.randint(1, 90), chance.randint(1, 60)) for i in range(count)]
    doomed = {one.request_id for one in requests if chance.random() < 0.33}
    tickets = loop.submit(requests)
    for ticket in tickets:
        one = ticket.request
        if one.request_id in doomed:
            if chance.random() < 0.5:
                ticket.get(DEADLOCK_S)
            loop.abort(one.request_id)
            loop.call(loop.engine.ledger.check)
    for ticket in tickets:
        one = ticket.request
        if one.request_id not in doomed:
            assert len(tokens(ticket)) == one.sampling.max_tokens


def test_random_requests_and_aborts_leak_no_page(start: Callable[..., EngineLoop]) -> None:
    loop = start()
    for seed in range(8):
        run_with_random_aborts(loop, 60, seed)
