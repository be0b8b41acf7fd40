"""The serving loop on fake engines with slots and pages: threads, aborts, failures, preemption."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from enginebay.compose.composition import Composed
from enginebay.contracts.engine import StepPlan
from enginebay.contracts.scheduler import Decision, Scheduler, SchedulerView
from enginebay.errors import InternalError, StoppedError
from enginebay.serving.admission import Admission
from enginebay.serving.loop import EngineLoop
from enginebay.serving.messages import Abort, Inbox, LoopCall, Stop, Submit
from enginebay.serving.running import Running, TokenEvent
from enginebay_schedulers.batch import run_batch
from tests.fakes import compose_fake, expected_tokens
from tests.pool import EnginePool
from tests.unit.loops import (
    MAX_NUM_SEQS,
    OPTIONS,
    FailsOnce,
    Loops,
    Pauses,
    PausesAfter,
    Preempting,
    Unread,
    all_tokens,
    composed,
    events,
    go_on,
    held,
    loop_threads,
    request,
    running,
    seeing,
    tokens,
)
from tests.unit.serving import DEADLOCK_S, within_minutes


@pytest.fixture(params=["vinference", "oengine"])
def parts(request: pytest.FixtureRequest, engine_pool: EnginePool) -> Iterator[Composed]:
    with composed(engine_pool, "fake", request.param, **OPTIONS[request.param]) as made:
        yield made


@pytest.fixture
def start(parts: Composed) -> Iterator[Loops]:
    """Starts loops, ends them, and looks at the books."""
    yield from running(parts)


@pytest.fixture
def loop(start: Loops) -> EngineLoop:
    return start()


def test_requests_from_many_threads_all_get_their_own_tokens(
    loop: EngineLoop,
) -> None:
    requests = [request(f"thread {i}", length=3 + 5 * i, max_tokens=6 + i) for i in range(6)]
    expected = [expected_tokens(one) for one in requests]
    num_rows: list[int] = []
    with ThreadPoolExecutor(len(requests)) as pool:
        got = list(pool.map(lambda one: tokens(loop.submit([one])[0]), requests))
        with seeing(loop.engine, launch=lambda plan: num_rows.append(len(plan.rows))):
            with held(loop):
                tickets = list(pool.map(lambda one: loop.submit([one])[0], requests))
            at_once = list(pool.map(tokens, tickets))
    assert got == at_once == expected
    assert [len(one) for one in got] == [6, 7, 8, 9, 10, 11]
    assert max(num_rows) > 1, "they run together"


def test_metrics_tell_the_request_in_order(loop: EngineLoop) -> None:
    last = events(loop.submit([request("measured", length=40, max_tokens=6)])[0])[-1]
    metrics = last.metrics
    assert metrics is not None
    times = [
        metrics.arrival_s,
        metrics.first_scheduled_s,
        metrics.first_token_s,
        metrics.finished_s,
    ]
    assert times == sorted(times)
    assert (metrics.num_prompt_tokens, metrics.num_generated_tokens) == (40, 6)
    assert last.finish_reason == "length"


def test_row_table_has_the_slot_of_each_row() -> None:
    loops = Loops(compose_fake("vinference"))
    loop = loops()
    table = loop.engine.rows.page_tables[0]

    def look(plan: StepPlan) -> None:
        for row in plan.rows:
            assert (table.num_pages[row.row], table.page_ids[row.row].tolist()) == (1, [row.row])

    with seeing(loop.engine, launch=look):
        tickets = loop.submit([request(f"slot {i}", max_tokens=4) for i in range(6)])
        assert [len(one) for one in all_tokens(tickets)] == [4] * 6
    assert not loop.call(lambda: table.num_pages.any() or table.page_ids.any())
    loops.close()


def test_a_waiting_request_is_aborted_before_it_begins(loop: EngineLoop) -> None:
    with held(loop):
        ticket, other = loop.submit([request("aborted"), request("kept", max_tokens=3)])
        loop.abort("aborted")
        loop.abort("nobody knows this one")
    assert [(e.token_ids, e.finish_reason) for e in events(ticket)] == [((), "abort")]
    assert len(tokens(other)) == 3


def test_a_running_request_is_aborted_and_its_row_serves_another(
    start: Loops, loop: EngineLoop
) -> None:
    long = [request(f"long {i}", max_tokens=150) for i in range(MAX_NUM_SEQS)]
    pauses = Pauses(loop, after=3)
    with seeing(loop.engine, launch=pauses):
        tickets = loop.submit(long)
        assert tickets[0].get(DEADLOCK_S).token_ids
        pauses.wait()
        waiting = loop.submit([request("next")])[0]
        loop.abort("long 0")
        assert events(tickets[0])[-1].finish_reason == "abort"
        loop.observers.add(PausesAfter(loop, "next"))
        go_on(loop)
    assert tokens(waiting) == expected_tokens(request("next"))
    for one in long[1:]:
        loop.abort(one.request_id)
    assert {events(ticket)[-1].finish_reason for ticket in tickets[1:]} == {"abort"}
    loop.abort("long 0")
    loop.call(start.check)


@within_minutes
def test_closing_fails_what_is_under_way_and_ends_the_thread(start: Loops) -> None:
    before = loop_threads()
    loop = start()
    assert len(loop_threads() - before) == 1
    with seeing(loop.engine, launch=Pauses(loop, after=3)):
        running = loop.submit(
            [request(f"running {i}", max_tokens=150) for i in range(MAX_NUM_SEQS)]
        )
        assert running[-1].get(DEADLOCK_S).token_ids
        waiting = loop.submit([request("waiting")])
        loop.close()
        loop.close()
    assert loop_threads() <= before
    for ticket in running + waiting:
        last = events(ticket)[-1]
        assert last.finish_reason == "error"
        assert isinstance(last.error, StoppedError)
    start.check()


def test_a_closed_loop_refuses_and_nobody_waits_for_it(loop: EngineLoop) -> None:
    loop.close()
    with pytest.raises(StoppedError, match="was closed: make a new one"):
        loop.submit([request("late")])
    with pytest.raises(StoppedError, match="was closed"):
        loop.call(lambda: 1)
    loop.abort("late")


def test_a_slow_reader_loses_nothing_and_slows_nobody(
    loop: EngineLoop,
) -> None:
    slow = loop.submit([request("slow", max_tokens=40)])[0]
    for i in range(3):
        quick = dataclasses.replace(request("quick"), request_id=f"quick {i}")
        assert tokens(loop.submit([quick])[0]) == expected_tokens(quick)
    loop.call(lambda: None)
    assert tokens(slow) == expected_tokens(request("slow", max_tokens=40))


def test_calls_run_on_the_engine_thread_with_every_step_read(loop: EngineLoop) -> None:
    unread, pauses = Unread(), Pauses(loop, after=5)
    with seeing(loop.engine, lambda plan: (unread.launch(plan), pauses(plan)), unread.read):
        ticket = loop.submit([request("meanwhile", max_tokens=100)])[0]
        ticket.get(DEADLOCK_S)
        pauses.wait()
        told = loop.call(lambda: (threading.current_thread().name, unread.now, unread.most))
        assert told == ("enginebay-loop", 0, 1)
        go_on(loop)
    assert loop.call(lambda: loop.call(lambda: "within")) == "within"
    with pytest.raises(KeyError, match="missing"):
        loop.call(lambda: {}["missing"])
    assert sum(len(event.token_ids) for event in events(ticket)) > 0


def test_a_function_takes_every_event_on_a_thread_of_its_own(loop: EngineLoop) -> None:
    seen: queue.SimpleQueue[tuple[TokenEvent, str]] = queue.SimpleQueue()
    one = request("taken", max_tokens=9)
    loop.submit([one], [lambda event: seen.put((event, threading.current_thread().name))])
    found: list[TokenEvent] = []
    while not found or found[-1].finish_reason is None:
        event, thread = seen.get(timeout=DEADLOCK_S)
        assert thread == "enginebay-delivery"
        found.append(event)
    assert [token for event in found for token in event.token_ids] == expected_tokens(one)


def test_an_idle_loop_uses_no_cpu(loop: EngineLoop) -> None:
    tokens(loop.submit([request("warm")])[0])
    loop.call(lambda: None)
    before = time.process_time()
    threading.Event().wait(0.5)
    assert time.process_time() - before < 0.1


@pytest.mark.parametrize("when", ["launch", "read"])
def test_a_failed_step_fails_its_requests_and_the_service_goes_on(
    start: Loops, loop: EngineLoop, when: str
) -> None:
    with seeing(loop.engine, **{when: FailsOnce()}):
        with held(loop):
            tickets = loop.submit(
                [request(f"unlucky {i}", max_tokens=30) for i in range(MAX_NUM_SEQS)]
            )
            waiting = loop.submit([request("after")])[0]
        for ticket in tickets:
            error = events(ticket)[-1].error
            assert isinstance(error, InternalError)
            assert "RuntimeError: the device is gone" in str(error)
        assert tokens(waiting) == expected_tokens(request("after"))
    loop.call(start.check)


class FailsAt:
    """Raises when the step that was launched with this number is read."""

    def __init__(self, number: int) -> None:
        self._left = number
        self._doomed: StepPlan | None = None

    def launch(self, plan: StepPlan) -> None:
        self._left -= 1
        if not self._left:
            self._doomed = plan

    def read(self, plan: StepPlan) -> None:
        if plan is self._doomed:
            raise RuntimeError("the device is gone")


def test_a_call_behind_a_failed_step_is_answered(loop: EngineLoop) -> None:
    fails, pauses = FailsAt(3), Pauses(loop, after=3)
    with seeing(loop.engine, lambda plan: (fails.launch(plan), pauses(plan)), fails.read):
        (ticket,) = loop.submit([request("unlucky", max_tokens=100)])
        pauses.wait()  # with the step launched and not read
        with pytest.raises(
            StoppedError, match="a step failed before the call could run: call again"
        ):
            loop.call(lambda: "answered")
        assert isinstance(events(ticket)[-1].error, InternalError)
        assert loop.call(lambda: "answered") == "answered"
        go_on(loop)
        assert tokens(loop.submit([request("after")])[0]) == expected_tokens(request("after"))


def test_a_step_that_fails_while_the_loop_is_closed_fails_nobody_else(
    loop: EngineLoop, caplog: pytest.LogCaptureFixture
) -> None:
    fails, pauses = FailsAt(3), Pauses(loop, after=3)
    with seeing(loop.engine, lambda plan: (fails.launch(plan), pauses(plan)), fails.read):
        (ticket,) = loop.submit([request("unlucky", max_tokens=100)])
        pauses.wait()
        loop.close()
    assert isinstance(events(ticket)[-1].error, StoppedError)
    assert [record.message for record in caplog.records] == [
        "a step failed while the loop was being closed"
    ]


def test_who_still_waits_in_the_inbox_of_a_broken_engine_is_told() -> None:
    inbox, ticket, answer = Inbox(), Running(request("late")), Future[Any]()
    inbox.put(Submit([ticket]), Abort("late"), LoopCall(lambda: 1, answer))
    inbox.close("the engine broke down")
    with pytest.raises(StoppedError, match="the engine broke down"):
        inbox.put(Stop())
    told = InternalError("no room")
    inbox.refuse_all(told)
    assert inbox.is_empty
    assert [event.error for event in events(ticket)] == [told]
    assert answer.exception(0) is told


class Fails(Scheduler):
    """Decides nothing but to fail, until it is mended."""

    def __init__(self, inner: Scheduler) -> None:
        self.inner, self.broken = inner, True

    def initial_state(self) -> Any:
        return self.inner.initial_state()

    def decide(self, view: SchedulerView, state: Any) -> tuple[Decision, Any]:
        if self.broken:
            raise ZeroDivisionError("a scheduler's bug")
        return self.inner.decide(view, state)


class Changed(Scheduler):
    """Decides like another one, but for a change."""

    def __init__(self, inner: Scheduler, change: Callable[[Decision], Decision]) -> None:
        self.inner, self.change = inner, change

    def initial_state(self) -> Any:
        return self.inner.initial_state()

    def decide(self, view: SchedulerView, state: Any) -> tuple[Decision, Any]:
        decision, state = self.inner.decide(view, state)
        return self.change(decision), state


NOTHING_OF_EACH = "the scheduler prefills 0 tokens of a request with 5 left, not 1 or more"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: dataclasses.replace(d, prefill=tuple((r, 0) for r, _ in d.prefill)),
            NOTHING_OF_EACH,
        ),
        (
            lambda d: dataclasses.replace(d, decode_steps=0),
            "the scheduler decodes 0 steps, not 1 or more",
        ),
    ],
    ids=["prefill", "decode"],
)
def test_a_decision_that_cannot_be_carried_out_fails_its_requests(
    start: Loops, parts: Composed, change: Callable[[Decision], Decision], message: str
) -> None:
    scheduler = Changed(parts.scheduler, change)
    loop = start(scheduler)
    error = events(loop.submit([request("unlucky")])[0])[-1].error
    assert isinstance(error, InternalError)
    assert message in str(error)
    scheduler.change = lambda decision: decision
    assert tokens(loop.submit([request("lucky")])[0]) == expected_tokens(request("lucky"))


def test_a_scheduler_that_waits_is_asked_again_and_news_are_heard(
    start: Loops, parts: Composed
) -> None:
    asked = threading.Semaphore(0)

    def wait(_: Decision) -> Decision:
        asked.release()
        return Decision()

    scheduler = Changed(parts.scheduler, wait)
    loop = start(scheduler)
    waits, doomed = loop.submit([request("waits"), request("doomed")])
    for _ in range(3):
        assert asked.acquire(timeout=DEADLOCK_S)
    loop.abort("doomed")
    assert events(doomed)[-1].finish_reason == "abort"
    scheduler.change = lambda decision: decision
    assert tokens(waits) == expected_tokens(request("waits"))


def test_a_failing_scheduler_fails_who_waits_instead_of_spinning(
    start: Loops, parts: Composed
) -> None:
    scheduler = Fails(parts.scheduler)
    loop = start(scheduler)
    error = events(loop.submit([request("unlucky")])[0])[-1].error
    assert "ZeroDivisionError: a scheduler's bug" in str(error)
    scheduler.broken = False
    assert len(tokens(loop.submit([request("lucky")])[0])) == 12


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("after", [1, 6])
def test_a_preempted_request_finishes_with_the_same_tokens(
    start: Loops, parts: Composed, after: int, temperature: float
) -> None:
    lengths = [4 + 9 * i for i in range(MAX_NUM_SEQS + 1)]
    requests = [request(f"row {i}", n, temperature=temperature) for i, n in enumerate(lengths)]
    scheduler = Preempting(parts.scheduler, after)
    loop = start(scheduler)
    assert all_tokens(loop.submit(requests)) == [expected_tokens(one) for one in requests]
    assert scheduler.preempted == {one.request_id for one in requests}


class MostLeftLast(Scheduler):
    """Decodes all rows, and first preempts the row that has most tokens left. It counts on the
    cache that the view has.
    """

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.preempted: list[str] = []

    def initial_state(self) -> None:
        """It keeps no state."""

    def decide(self, view: SchedulerView, state: None) -> tuple[Decision, None]:
        names = [row.request_id for row in view.running]
        waits = [one.request_id for one in view.waiting]
        self.preempted += [name for name in self.ran if name in waits]
        self.ran = names
        order = sorted(view.running, key=lambda row: row.max_new_left)
        return run_batch(view, [*order, *view.waiting], 4), None


NEWS = (8, 30, 12, 9)
"""New tokens of requests that fill all rows."""


def refuse_once(scheduler: MostLeftLast, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse cache to all rows, although the view had enough: from when all have tokens until one
    is preempted.
    """
    reserve = Admission.reserve

    def refusing(self: Admission, tracked: Running, num_tokens: int) -> bool:
        rows = self.requests.running.values()
        is_short = len(rows) == MAX_NUM_SEQS and all(row.output for row in rows)
        return not (is_short and not scheduler.preempted) and reserve(self, tracked, num_tokens)

    monkeypatch.setattr(Admission, "reserve", refusing)


def test_a_scheduler_chooses_whom_to_preempt_when_no_row_gets_cache(
    start: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = MostLeftLast()
    refuse_once(scheduler, monkeypatch)
    requests = [request(f"row {i}", 5, n, arrival_s=float(i)) for i, n in enumerate(NEWS)]
    loop = start(scheduler)
    assert all_tokens(loop.submit(requests)) == [expected_tokens(one) for one in requests]
    assert scheduler.preempted == ["row 1"]


def test_the_latest_arrival_is_preempted_when_the_scheduler_preempts_none(
    start: Loops, parts: Composed, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = MostLeftLast()
    refuse_once(scheduler, monkeypatch)
    requests = [request(f"row {i}", 5, n, arrival_s=float(i)) for i, n in enumerate(NEWS)]
    loop = start(Changed(scheduler, lambda d: dataclasses.replace(d, preempt=())))
    assert all_tokens(loop.submit(requests)) == [expected_tokens(one) for one in requests]
    assert scheduler.preempted == ["row 3"]
