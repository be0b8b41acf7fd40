"""EngineLoop: the one thread that drives an engine."""

from __future__ import annotations

import collections
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from enginebay.config import EngineConfig
from enginebay.engine import Engine, Pending, RowPlan, StepPlan
from enginebay.errors import EnginebayError, InternalError, StoppedError, explain
from enginebay.loop.book import Book, Tracked, record_tokens
from enginebay.loop.messages import Abort, Call, Message, Stop, Submit, Ticket, TokenEvent
from enginebay.scheduler import Decision, Limits, Scheduler
from enginebay.types import FinishReason, Request

log = logging.getLogger("enginebay.loop")

MAX_IN_FLIGHT = 2
"""Launched but unread steps: one runs while the next one waits for the device, so that it is never idle."""

POLL_S = 0.002
"""How long to wait for news when a scheduler asks to wait although requests are queued."""


@dataclasses.dataclass(slots=True)
class InFlight:
    """A launched step and the requests of its rows, in the plan's order."""

    pending: Pending
    rows: list[Tracked]


class EngineLoop:
    """Admits, schedules, launches and commits, on a thread of its own.

    One step is launched ahead of the one being read: decoding rows continue from the token that the device sampled,
    which the host learns later. Every method may be called from any thread.
    """

    def __init__(self, engine: Engine, scheduler: Scheduler, config: EngineConfig) -> None:
        self.engine = engine
        self.scheduler = scheduler
        self.config = config
        self._state = scheduler.initial_state()
        self._book = Book()
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._in_flight: collections.deque[InFlight] = collections.deque()
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="enginebay-loop", daemon=True)
        self._thread.start()

    # Called from any thread.

    def submit(self, requests: Iterable[Request]) -> list[Ticket]:
        """Queue requests, all or none; StoppedError after close()."""
        tickets = [Ticket(request) for request in requests]
        with self._lock:
            if self._closed:
                raise StoppedError("the engine was closed: make a new one to go on")
            for ticket in tickets:
                self._inbox.put(Submit(ticket))
        return tickets

    def abort(self, request_id: str) -> None:
        """End a request with reason "abort" and free what it held; an ended or unknown one is left alone."""
        self._inbox.put(Abort(request_id))

    def call(self, function: Callable[[], Any]) -> Any:
        """Run `function` on the engine thread between steps, and return what it returns or raise what it raises."""
        if threading.current_thread() is self._thread:
            return function()
        result: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise StoppedError("the engine was closed: make a new one to go on")
            self._inbox.put(Call(function, result))
        return result.result()

    def close(self) -> None:
        """Fail what is under way, and end the thread. Closing twice is fine."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(Stop())
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # The engine thread.

    def _run(self) -> None:
        while True:
            try:
                if not self._turn():
                    return
            except Exception as error:  # the loop's outer edge: a failed step must not end the service
                log.exception("a step failed")
                self._recover(error)

    def _turn(self) -> bool:
        """Take in messages, launch what the scheduler decides, read a step when it is time. False: stop."""
        if not self._take_in():
            return False
        launched = self._launch_decided() if self._book.waiting or self._book.running else False
        if self._in_flight and (not launched or len(self._in_flight) >= MAX_IN_FLIGHT):
            self._commit(self._in_flight.popleft())
        elif not launched and not self._in_flight and self._book.everything:
            self._wait_for_news()
        return True

    def _take_in(self) -> bool:
        idle = not self._book.waiting and not self._book.running and not self._in_flight
        while idle or not self._inbox.empty():
            if not self._handle(self._inbox.get()):
                return False
            idle = not self._book.waiting and not self._book.running and not self._in_flight
        return True

    def _handle(self, message: Message) -> bool:
        match message:
            case Submit(ticket):
                self._book.add(ticket)
            case Abort(request_id):
                tracked = self._book.find(request_id)
                if tracked is not None:
                    self._end(tracked, "abort")
            case Call(function, result):
                self._answer(function, result)
            case Stop():
                self._stop()
                return False
        return True

    def _answer(self, function: Callable[[], Any], result: Future[Any]) -> None:
        try:
            while self._in_flight:
                self._commit(self._in_flight.popleft())
            result.set_result(function())
        except Exception as error:  # belongs to the caller, who gets it
            result.set_exception(error)

    def _stop(self) -> None:
        for tracked in self._book.everything:
            self._end(tracked, "error", StoppedError("the engine was closed before the request finished"))
        while not self._inbox.empty():
            match self._inbox.get():
                case Submit(ticket):
                    ticket.put(TokenEvent((), "error", error=StoppedError("the engine was closed before the request began")))
                case Call(_, result):
                    result.set_exception(StoppedError("the engine was closed"))
        self._in_flight.clear()

    def _wait_for_news(self) -> None:
        """The scheduler wants to wait: for time to pass, or for another request."""
        try:
            message = self._inbox.get(timeout=POLL_S)
        except queue.Empty:
            return
        if not self._handle(message):
            self._inbox.put(message)

    def _limits(self) -> Limits:
        ledger = self.engine.ledger
        free_rows = self.config.max_num_seqs - len(self._book.running)
        return Limits(
            self.config.max_num_seqs, self.config.max_num_batched_tokens, self.config.decode_steps, free_rows, ledger.num_free_tokens
        )

    def _launch_decided(self) -> bool:
        """Ask the scheduler, do what it says; whether a step was launched."""
        view = self._book.view(time.monotonic(), self._limits())
        decision, self._state = self.scheduler.decide(view, self._state)
        for request_id in decision.preempt:
            self._preempt(request_id)
        prefilled = self._launch_prefill(decision)
        return self._launch_decode(decision) or prefilled

    def _preempt(self, request_id: str) -> None:
        """Take a running request's row away, after reading what it has produced so far."""
        while self._in_flight:
            self._commit(self._in_flight.popleft())
        tracked = self._book.running.get(request_id)
        if tracked is not None:
            self._free(tracked)
            self._book.requeue(tracked)

    def _launch_prefill(self, decision: Decision) -> bool:
        plans: list[RowPlan] = []
        rows: list[Tracked] = []
        demand = self._book.demand()
        for request_id, num_tokens in decision.prefill:
            tracked = self._book.find(request_id)
            if tracked is None or (tracked.lease is None and not self._admit(tracked)):
                continue
            plans.append(self._plan_chunk(tracked, num_tokens))
            rows.append(tracked)
        if plans:
            self._in_flight.append(InFlight(self.engine.step(StepPlan(tuple(plans), 0, demand)), rows))
        return bool(plans)

    def _admit(self, tracked: Tracked) -> bool:
        request = tracked.request
        table = self.engine.rows
        table.add_request(request)
        row = table.row_of(request.request_id)
        table.append_tokens(row, tracked.output)
        token_ids = table.token_ids[row, : tracked.num_prefill]
        lease = self.engine.ledger.admit(row, token_ids, tracked.num_total)
        if lease is None:
            table.remove_request(request.request_id)
            return False
        tracked.lease = lease
        tracked.num_computed = lease.num_cached
        tracked.metrics.num_cached_tokens = lease.num_cached
        tracked.metrics.first_scheduled_s = time.monotonic()
        del self._book.waiting[request.request_id]
        self._book.running[request.request_id] = tracked
        return True

    def _plan_chunk(self, tracked: Tracked, num_tokens: int) -> RowPlan:
        lease = tracked.lease
        assert lease is not None, "only admitted requests are planned"
        start = tracked.num_computed
        count = min(num_tokens, tracked.num_prefill - start)
        tracked.num_computed += count
        samples = tracked.num_computed == tracked.num_prefill
        tracked.num_launched += samples
        if not self.engine.ledger.reserve(lease, tracked.num_computed):
            raise InternalError(f"the scheduler promised {tracked.num_computed} tokens of cache that are not free")
        return RowPlan(lease.row, lease, start, count, samples)

    def _launch_decode(self, decision: Decision) -> bool:
        chosen = [t for r in decision.decode if (t := self._book.running.get(r)) and t.num_new_left > 0]
        steps = min(decision.decode_steps, self.config.decode_steps, max((t.num_new_left for t in chosen), default=0))
        plans: list[RowPlan] = []
        rows: list[Tracked] = []
        for tracked in chosen:
            lease = tracked.lease
            assert lease is not None, "running requests have a lease"
            cached = tracked.num_tokens - 1
            if not self.engine.ledger.reserve(lease, min(cached + steps, tracked.num_total)):
                continue
            plans.append(RowPlan(lease.row, lease, cached, 1, samples=True))
            rows.append(tracked)
            tracked.num_launched += min(steps, tracked.num_new_left)
        if plans:
            self._in_flight.append(InFlight(self.engine.step(StepPlan(tuple(plans), steps, self._book.demand())), rows))
        return bool(plans)

    def _commit(self, step: InFlight) -> None:
        """Read a launched step and tell its tokens. Rows whose request has ended meanwhile are passed over."""
        tokens = step.pending.read()
        now_s = time.monotonic()
        for tracked, row_tokens in zip(step.rows, tokens, strict=True):
            if tracked.finished:
                continue
            event = record_tokens(tracked, row_tokens, now_s)
            if event.token_ids:
                assert tracked.lease is not None, "an unfinished request of a launched step holds its row"
                self.engine.rows.append_tokens(tracked.lease.row, event.token_ids)
            if tracked.finished:
                self._free(tracked)
                self._book.drop(tracked)
            if event.token_ids or event.finish_reason:
                tracked.ticket.put(event)

    def _free(self, tracked: Tracked) -> None:
        """Give back a request's row and lease, if it holds them."""
        if tracked.lease is not None:
            self.engine.ledger.release(tracked.lease)
            self.engine.rows.remove_request(tracked.request.request_id)
            tracked.lease = None

    def _end(self, tracked: Tracked, reason: FinishReason, error: EnginebayError | None = None) -> None:
        """End a request before its natural end."""
        tracked.finished = True
        tracked.metrics.finished_s = time.monotonic()
        self._free(tracked)
        self._book.drop(tracked)
        tracked.ticket.put(TokenEvent((), reason, tracked.metrics, error))

    def _recover(self, error: Exception) -> None:
        """Fail every request that has part in the arrays, and begin anew with fresh ones."""
        told = error if isinstance(error, EnginebayError) else InternalError(explain(f"a step failed: {type(error).__name__}: {error}", "steps that succeed", "The service goes on; please report this."))
        self._in_flight.clear()
        for tracked in list(self._book.running.values()):
            self._end(tracked, "error", told)
        self.engine.drop_arrays()
        self.engine.make_arrays()

