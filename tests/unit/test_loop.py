"""The serving loop on the contiguous engine: threads, aborts, failures and preemption, with the books right after each."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from enginebay.build.compose import Composed, build, make_plan
from enginebay.config import EngineConfig
from enginebay.engine import StepPlan
from enginebay.errors import InternalError, StoppedError
from enginebay.loop.loop import EngineLoop
from enginebay.loop.messages import Ticket, TokenEvent
from enginebay.scheduler import Decision, Scheduler, SchedulerView
from enginebay.types import FrozenSampling, Request
from tests.brief import BRIEF
from tests.unit.serving import DEADLOCK_S, SIZES

MAX_NUM_SEQS = SIZES["max_num_seqs"]
NUM_TOKENS = MAX_NUM_SEQS * SIZES["max_model_len"]
pytestmark = pytest.mark.xdist_group("loop")


@pytest.fixture(scope="module")
def parts() -> Composed:
    return build(make_plan(EngineConfig(model=BRIEF, processors=(), **SIZES)))


@pytest.fixture
def start(parts: Composed) -> Iterator[Callable[..., EngineLoop]]:
    """Starts loops, ends them, and looks at the books."""
    loops = []

    def make(scheduler: Scheduler | None = None) -> EngineLoop:
        loops.append(EngineLoop(parts.engine, scheduler or parts.scheduler, parts.plan.config))
        return loops[-1]

    yield make
    for loop in loops:
        loop.close()
        assert not loop._thread.is_alive()
        assert_books_are_closed(loop)


@pytest.fixture
def loop(start: Callable[..., EngineLoop]) -> EngineLoop:
    return start()


def assert_books_are_closed(loop: EngineLoop) -> None:
    loop.engine.ledger.check()
    assert loop.engine.rows.num_reqs == 0
    assert loop.engine.ledger.num_free_tokens == NUM_TOKENS


def request(name: str, length: int = 5, max_tokens: int = 12, *, temperature: float = 0.0) -> Request:
    """A prompt that depends on the name and length, never ended by a stop token."""
    seed = sum(map(ord, name))
    prompt = np.random.default_rng(seed).integers(4, 2048, length).astype(np.int32)
    sampling = FrozenSampling(max_tokens, temperature, 0, 1.0, 0.0, (), (), False, True)
    return Request(name, prompt, sampling, (seed, 7), time.monotonic())


def events(ticket: Ticket) -> list[TokenEvent]:
    """All events to the last, each within reason."""
    found = [ticket.get(DEADLOCK_S)]
    while found[-1].finish_reason is None:
        found.append(ticket.get(DEADLOCK_S))
    return found


def tokens(ticket: Ticket) -> list[int]:
    found = events(ticket)
    assert found[-1].error is None
    return [token for event in found for token in event.token_ids]


@pytest.fixture(scope="module")
def alone(parts: Composed) -> Callable[[Request], list[int]]:
    """The tokens of a request that has the engine for itself; to be asked for while no other loop uses it."""
    known: dict[tuple[str, int, int, float], list[int]] = {}

    def run(one: Request) -> list[int]:
        key = (one.request_id, len(one.prompt_token_ids), one.sampling.max_tokens, one.sampling.temperature)
        if key not in known:
            loop = EngineLoop(parts.engine, parts.scheduler, parts.plan.config)
            known[key] = tokens(loop.submit([one])[0])
            loop.close()
        return known[key]

    return run


class Held:
    """Keeps the engine thread in a call until let go, so that what is submitted meanwhile arrives together."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._holds, self._go = threading.Event(), threading.Event()
        self._caller = threading.Thread(target=loop.call, args=(self._hold,))

    def _hold(self) -> None:
        self._holds.set()
        assert self._go.wait(DEADLOCK_S)

    def __enter__(self) -> None:
        self._caller.start()
        assert self._holds.wait(DEADLOCK_S)

    def __exit__(self, *_: object) -> None:
        self._go.set()
        self._caller.join(DEADLOCK_S)


def test_requests_from_many_threads_all_get_their_own_tokens(
    loop: EngineLoop, alone: Callable[[Request], list[int]]
) -> None:
    requests = [request(f"thread {i}", length=3 + 5 * i, max_tokens=6 + i) for i in range(6)]
    expected = [alone(one) for one in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        got = list(pool.map(lambda one: tokens(loop.submit([one])[0]), requests))
    assert got == expected
    assert [len(one) for one in got] == [6, 7, 8, 9, 10, 11]


def test_metrics_tell_the_request_in_order(loop: EngineLoop) -> None:
    last = events(loop.submit([request("measured", length=40, max_tokens=6)])[0])[-1]
    metrics = last.metrics
    assert metrics is not None
    times = [metrics.arrival_s, metrics.first_scheduled_s, metrics.first_token_s, metrics.finished_s]
    assert times == sorted(times)
    assert (metrics.num_prompt_tokens, metrics.num_generated_tokens) == (40, 6)
    assert last.finish_reason == "length"


def test_row_table_has_the_slot_of_each_row(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    step, table = loop.engine.step, loop.engine.rows.page_tables[0]

    def watched(plan: StepPlan) -> Any:
        for row in plan.rows:
            assert (table.num_pages[row.row], table.page_ids[row.row].tolist()) == (1, [row.row])
        return step(plan)

    monkeypatch.setattr(loop.engine, "step", watched)
    assert [len(tokens(t)) for t in loop.submit([request(f"slot {i}", max_tokens=4) for i in range(6)])] == [
        4
    ] * 6
    assert not loop.call(lambda: table.num_pages.any() or table.page_ids.any())


def test_a_waiting_request_is_aborted_before_it_begins(loop: EngineLoop) -> None:
    with Held(loop):
        ticket, other = loop.submit([request("aborted"), request("kept", max_tokens=3)])
        loop.abort("aborted")
        loop.abort("nobody knows this one")
    assert [(e.token_ids, e.finish_reason) for e in events(ticket)] == [((), "abort")]
    assert len(tokens(other)) == 3


def test_a_running_request_is_aborted_and_its_row_serves_another(
    loop: EngineLoop, alone: Callable[[Request], list[int]]
) -> None:
    expected = alone(request("next"))
    long = [request(f"long {i}", max_tokens=150) for i in range(MAX_NUM_SEQS)]
    tickets = loop.submit(long)
    assert tickets[0].get(DEADLOCK_S).token_ids
    waiting = loop.submit([request("next")])[0]
    loop.abort("long 0")
    assert events(tickets[0])[-1].finish_reason == "abort"
    assert tokens(waiting) == expected
    for one in long[1:]:
        loop.abort(one.request_id)
    assert {events(ticket)[-1].finish_reason for ticket in tickets[1:]} == {"abort"}
    loop.abort("long 0")
    assert loop.call(lambda: loop.engine.ledger.num_free_tokens) == NUM_TOKENS


def test_closing_fails_what_is_under_way_and_ends_the_thread(loop: EngineLoop) -> None:
    running = loop.submit([request(f"running {i}", max_tokens=150) for i in range(MAX_NUM_SEQS)])
    assert running[-1].get(DEADLOCK_S).token_ids
    waiting = loop.submit([request("waiting")])
    loop.close()
    loop.close()
    assert not loop._thread.is_alive()
    for ticket in running + waiting:
        last = events(ticket)[-1]
        assert last.finish_reason == "error"
        assert isinstance(last.error, StoppedError)
    assert_books_are_closed(loop)


def test_a_closed_loop_refuses_and_nobody_waits_for_it(loop: EngineLoop) -> None:
    loop.close()
    with pytest.raises(StoppedError, match="was closed: make a new one"):
        loop.submit([request("late")])
    with pytest.raises(StoppedError, match="was closed"):
        loop.call(lambda: 1)
    loop.abort("late")


def test_a_slow_reader_loses_nothing_and_slows_nobody(
    loop: EngineLoop, alone: Callable[[Request], list[int]]
) -> None:
    expected = [alone(request("slow", max_tokens=40)), alone(request("quick"))]
    slow = loop.submit([request("slow", max_tokens=40)])[0]
    for i in range(3):
        quick = dataclasses.replace(request("quick"), request_id=f"quick {i}")
        assert tokens(loop.submit([quick])[0]) == expected[1]
    loop.call(lambda: None)
    assert tokens(slow) == expected[0]


def test_calls_run_on_the_engine_thread_with_every_step_read(loop: EngineLoop) -> None:
    ticket = loop.submit([request("meanwhile", max_tokens=100)])[0]
    ticket.get(DEADLOCK_S)
    name, in_flight = loop.call(lambda: (threading.current_thread().name, len(loop._steps.in_flight)))
    assert (name, in_flight) == ("enginebay-loop", 0)
    assert loop.call(lambda: loop.call(lambda: "within")) == "within"
    with pytest.raises(KeyError, match="missing"):
        loop.call(lambda: {}["missing"])
    assert sum(len(event.token_ids) for event in events(ticket)) > 0


def test_a_listener_is_told_of_every_event_after_it_came(loop: EngineLoop) -> None:
    told = threading.Semaphore(0)
    with Held(loop):
        ticket = loop.submit([request("listened", max_tokens=9)])[0]
        ticket.listen(told.release)
    seen: list[TokenEvent] = []
    while not seen or seen[-1].finish_reason is None:
        assert told.acquire(timeout=DEADLOCK_S)
        seen.append(ticket.get_nowait())
    assert sum(len(event.token_ids) for event in seen) == 9


def test_an_idle_loop_uses_no_cpu(loop: EngineLoop) -> None:
    tokens(loop.submit([request("warm")])[0])
    loop.call(lambda: None)
    before = time.process_time()
    threading.Event().wait(0.5)
    assert time.process_time() - before < 0.1


class FailOnce:
    """An engine's step that fails the first time, before or after it was launched."""

    def __init__(self, step: Callable[[StepPlan], Any], *, when_read: bool) -> None:
        self.step, self.when_read, self.failed = step, when_read, False

    def __call__(self, plan: StepPlan) -> Any:
        if self.failed or not plan.is_decode:
            return self.step(plan)
        self.failed = True
        if not self.when_read:
            raise RuntimeError("the device is gone")
        pending = self.step(plan)

        class Unreadable(type(pending)):  # type: ignore[misc]
            def __init__(self) -> None:
                pass

            def read(self) -> np.ndarray:
                raise RuntimeError("the device is gone")

        return Unreadable()


@pytest.mark.parametrize("when_read", [False, True])
def test_a_failed_step_fails_its_requests_and_the_service_goes_on(
    loop: EngineLoop, alone: Callable[[Request], list[int]], monkeypatch: pytest.MonkeyPatch, when_read: bool
) -> None:
    expected = alone(request("after"))
    monkeypatch.setattr(loop.engine, "step", FailOnce(loop.engine.step, when_read=when_read))
    with Held(loop):
        tickets = loop.submit([request(f"unlucky {i}", max_tokens=30) for i in range(MAX_NUM_SEQS)])
        waiting = loop.submit([request("after")])[0]
    for ticket in tickets:
        error = events(ticket)[-1].error
        assert isinstance(error, InternalError)
        assert "RuntimeError: the device is gone" in str(error)
    assert tokens(waiting) == expected
    assert loop.call(lambda: loop.engine.ledger.num_free_tokens) == NUM_TOKENS


def test_a_call_behind_a_failed_step_is_answered(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop.engine, "step", FailOnce(loop.engine.step, when_read=True))
    tickets = loop.submit([request("unlucky", max_tokens=100)])
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(loop.call, lambda: "answered")
        assert isinstance(events(tickets[0])[-1].error, InternalError)
        failure = answer.exception(DEADLOCK_S)  # None when the call came first or last
        assert failure is None or "call again" in str(failure)
    assert loop.call(lambda: "answered") == "answered"


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


def test_a_failing_scheduler_fails_who_waits_instead_of_spinning(
    start: Callable[..., EngineLoop], parts: Composed
) -> None:
    scheduler = Fails(parts.scheduler)
    loop = start(scheduler)
    error = events(loop.submit([request("unlucky")])[0])[-1].error
    assert "ZeroDivisionError: a scheduler's bug" in str(error)
    scheduler.broken = False
    assert len(tokens(loop.submit([request("lucky")])[0])) == 12


def test_an_engine_that_cannot_begin_anew_tells_everybody(
    start: Callable[..., EngineLoop], parts: Composed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory() -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        loop = start()
        patch.setattr(loop.engine, "step", FailOnce(loop.engine.step, when_read=False))
        patch.setattr(loop.engine, "make_arrays", out_of_memory)
        with Held(loop):
            tickets = loop.submit([request(f"unlucky {i}") for i in range(MAX_NUM_SEQS + 2)])
        for ticket in tickets:
            assert isinstance(events(ticket)[-1].error, InternalError)
        loop.close()
        with pytest.raises(
            StoppedError, match=r"the engine broke down .MemoryError: no room.: make a new one"
        ):
            loop.submit([request("late")])
    parts.engine.make_arrays()


class Preempting(Scheduler):
    """Fcfs that takes the row of each request away once, when it has `after` tokens more than its prompt."""

    def __init__(self, inner: Scheduler, after: int) -> None:
        self.inner, self.after = inner, after
        self.preempted: set[str] = set()

    def initial_state(self) -> frozenset[str]:
        return frozenset()

    def decide(self, view: SchedulerView, state: frozenset[str]) -> tuple[Decision, frozenset[str]]:
        ripe = [
            row.request_id
            for row in view.running
            if row.request_id not in state and row.num_left == 0 and row.max_new_left <= 12 - self.after
        ]
        if ripe:
            self.preempted.update(ripe)
            return Decision(preempt=tuple(ripe)), state | set(ripe)
        return self.inner.decide(view, self.inner.initial_state())[0], state


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("after", [1, 6])
def test_a_preempted_request_finishes_with_the_same_tokens(
    start: Callable[..., EngineLoop],
    parts: Composed,
    alone: Callable[[Request], list[int]],
    after: int,
    temperature: float,
) -> None:
    requests = [
        request(f"row {i}", length=4 + 9 * i, temperature=temperature) for i in range(MAX_NUM_SEQS + 1)
    ]
    scheduler = Preempting(parts.scheduler, after)
    expected = [alone(one) for one in requests]
    loop = start(scheduler)
    got = [tokens(ticket) for ticket in loop.submit(requests)]
    assert scheduler.preempted == {one.request_id for one in requests}
    assert got == expected
