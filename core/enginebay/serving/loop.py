"""EngineLoop: the thread that drives an engine."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from enginebay.config import EngineConfig
from enginebay.contracts.engine import Engine
from enginebay.contracts.proposer import Proposer
from enginebay.contracts.scheduler import Scheduler
from enginebay.errors import EnginebayError, RequestError, StoppedError, error_line
from enginebay.plugins.blame import failure
from enginebay.serving.delivery import Delivery
from enginebay.serving.idle import IdleRelease
from enginebay.serving.messages import (
    Abort,
    Inbox,
    LoopCall,
    LoopMessage,
    Stop,
    Submit,
)
from enginebay.serving.observer import Observers
from enginebay.serving.request_table import RequestTable
from enginebay.serving.running import Running, TakeEvent, TokenEvent
from enginebay.serving.steps import StepRunner
from enginebay.types import Request
from enginebay.waits import has_ended

log = logging.getLogger("enginebay.loop")

MAX_IN_FLIGHT = 2
"""The largest number of launched, unread steps: one runs, and the next waits on the device, so that
the device is never idle. Without `overlap_execution` there is one.
"""

TOO_FEW_TOKENS = -1
"""Limits.free_tokens when no running row can go on: fewer than rows that need no cache would need,
so that the scheduler's own rule says which rows are preempted.
"""

POLL_S = 0.002
"""How long the loop waits for a message when the scheduler launches nothing although requests are
queued.
"""


class EngineLoop:
    """Drives an engine on a thread of its own: admits requests, schedules, launches steps, and
    returns tokens.

    It launches one step ahead of the step that it reads: decoding rows continue from the token that
    the device sampled, before the host has read that token. Without `overlap_execution` each step
    is read before the next one is launched. Every public method may be called from any thread.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        config: EngineConfig,
        proposer: Proposer | None = None,
        observers: Observers | None = None,
    ) -> None:
        """`proposer` drafts tokens for engines that verify drafts; None: no drafts. `observers`:
        the Observers of the loop before this one; None: new ones, still empty.
        """
        self.engine = engine
        self.scheduler = scheduler
        self._state = scheduler.initial_state()
        self._requests = RequestTable()
        self._process_id = os.getpid()
        self._delivery = Delivery(self.abort)
        self._steps = StepRunner(
            engine, config, self._requests, proposer, self._delivery.flush, observers
        )
        self._max_unread = MAX_IN_FLIGHT - 1 if config.overlap_execution else 0
        self.observers = self._steps.observers
        self._inbox = Inbox()
        self._submitted: Running | None = None  # the request that is being queued
        self._unqueued: collections.deque[Running] = collections.deque()  # those after it
        # Set inside call(). While it is True, messages are handled but no step is launched.
        self.is_paused = False
        self._idle = IdleRelease(engine, config.idle_release_s)
        self._thread = threading.Thread(target=self._run, name="enginebay-loop", daemon=True)
        self._thread.start()

    # Called from any thread.

    @property
    def num_waiting(self) -> int:
        """Number of requests without a row, as of now."""
        return len(self._requests.waiting)

    @property
    def num_running(self) -> int:
        """Number of requests with a row, as of now."""
        return len(self._requests.running)

    @property
    def is_closed(self) -> bool:
        """Whether it refuses requests: it was closed, or the engine failed for good."""
        return self._inbox.is_closed

    def submit(
        self, requests: Sequence[Request], takes: Sequence[TakeEvent] | None = None
    ) -> list[Running]:
        """Queue all requests or none. StoppedError after close().

        takes[i] is called with each event of requests[i], on the delivery thread (see Delivery), up
        to the event with a finish reason. When `takes` is None, `get` of the returned objects
        reads the events. RequestError when this is called on the engine's thread with `takes`.
        """
        _check_process(self._process_id)
        if takes is None:
            made = [Running(request) for request in requests]
        elif threading.current_thread() is self._thread:
            raise RequestError(
                "a request from the engine's own thread, which would wait for itself",
                "requests from any other thread",
                "Submit it outside run_on_engine, observers and schedulers.",
            )
        else:
            due = self._delivery.due
            each = zip(requests, takes, strict=True)
            made = [Running(request, take, due) for request, take in each]
        self._inbox.put(Submit(made))
        return made

    def abort(self, request_id: str) -> None:
        """End a request with the finish reason "abort", and free its row and cache. Ended and
        unknown requests are ignored.
        """
        with contextlib.suppress(StoppedError):  # close() ends the request too
            self._inbox.put(Abort(request_id))

    def call(self, function: Callable[[], Any]) -> Any:
        """Run `function` on the engine thread between steps. Returns its result, or raises its
        exception.

        An exception that would end a thread, such as SystemExit, is raised here as InternalError,
        and the engine thread goes on.
        """
        if threading.current_thread() is self._thread:
            return function()
        _check_process(self._process_id)
        result: Future[Any] = Future()
        self._inbox.put(LoopCall(function, result))
        try:
            return result.result()
        finally:
            result.cancel()  # an interrupted caller no longer wants the function to run

    def prompt_ids(self) -> tuple[set[str], set[str]]:
        """Ids of (waiting, running) prompts, as of now; a running prompt has at least one
        completion with a row.
        """
        running = {one.request.parent_id for one in list(self._requests.running.values())}
        waiting = {one.request.parent_id for one in list(self._requests.waiting.values())}
        return waiting - running, running

    @property
    def adapter_counts(self) -> tuple[Counter[str], Counter[str]]:
        """Number of (waiting, running) completions by key of their adapter, as of now."""
        return self._requests.adapter_counts()

    def end_all(self, error: EnginebayError) -> None:
        """End every request with an error. Only on the engine thread, see call()."""
        for tracked in self._requests.everything:
            self._steps.end(tracked, "error", error)

    @property
    def adapters_in_use(self) -> set[str]:
        """Keys of the adapters of all unfinished requests. Only on the engine thread."""
        return {tracked.request.adapter for tracked in self._requests.everything}

    def close(self) -> bool:
        """End unfinished requests with StoppedError, and end the threads. A second call does
        nothing. Returns whether the engine thread has ended; one that hangs is left behind (see
        has_ended).
        """
        self._inbox.close("the engine was closed: make a new one", last=Stop())
        if threading.current_thread() is self._thread:
            return True
        ended = has_ended(self._thread)
        if ended:
            self._delivery.join()
        return ended

    # The engine thread.

    def _run(self) -> None:
        going = True
        while going:
            try:
                going = self._turn()
            # The loop's outer edge: whatever a plugin raises, waiting readers get an answer.
            except BaseException as error:
                log.exception("a step failed")
                going = self._recover(error)
            if self._delivery.due:
                self._delivery.flush()
        # A running step returns arrays to the interpreter when it ends. If the interpreter has
        # ended by then, the process aborts.
        for step in self._steps.in_flight:
            try:
                step.pending.read()
            except BaseException:  # nothing waits for its tokens, and the loop ends anyway
                log.warning("a step failed while the loop was being closed", exc_info=True)
        self._delivery.close()

    def _turn(self) -> bool:
        """Handle messages, launch what the scheduler decides, and read a step when one is due.
        Returns False to stop.
        """
        if self._steps.awaits_stop_texts:
            self._steps.awaits_stop_texts = False
            # A step is running meanwhile. No row whose text has ended is launched again.
            self._delivery.catch_up()
        if not self._handle_messages():
            return False
        if self._steps.late:
            self._steps.collect_late()
        self._idle.has_worked = True
        launched = False
        if self._requests.can_go_on:  # the others are only waiting to be read
            ledger = self.engine.ledger
            admission = self._steps.admission
            look_up = admission.num_cached if self.scheduler.needs_cached_tokens else None
            began_s = time.monotonic()
            view = self._requests.view(began_s, self._steps.limits(), look_up, forks=ledger.forks)
            decision, self._state = self.scheduler.decide(view, self._state)
            if self.observers.is_on:
                self.observers.decided(began_s)
            launched = self._steps.launch(decision)
            if not launched and self._steps.is_stuck(decision):
                # The view had enough cache, but the ledger has none for these rows.
                short = dataclasses.replace(self._steps.limits(), free_tokens=TOO_FEW_TOKENS)
                view = self._requests.view(began_s, short, look_up, forks=ledger.forks)
                self._steps.free_cache(self.scheduler.decide(view, self._state)[0].preempt)
                launched = True
            if self.observers.is_on:
                self.observers.carried_out(self._requests, ledger)
        if launched:
            # A decision may launch several steps.
            while len(self._steps.in_flight) > self._max_unread:
                self._steps.commit_next()
        elif self._steps.in_flight:
            self._steps.commit_next()
        elif not self._requests.is_empty:
            # The scheduler waits, with nothing in flight: for time to pass, or for a message.
            try:
                message = self._inbox.get(POLL_S)
            except queue.Empty:
                return True
            return self._handle(message)
        return True

    def _handle_messages(self) -> bool:
        """Handle all messages, and queue the requests of each. Wait for a message while there is
        nothing to do, or while the loop is paused. Returns False to stop.
        """
        while self._unqueued or self.is_paused or self._steps.is_idle or not self._inbox.is_empty:
            if self._unqueued:
                self._submitted = self._unqueued.popleft()
                self._steps.add(self._submitted)
                self._submitted = None
                if self._delivery.due:
                    self._delivery.flush()
                continue
            if self._inbox.is_closed and self._inbox.is_empty:
                return False  # handling Stop has failed, and the other requests have ended since
            inbox, idle = self._inbox, self._idle
            goes_on = self._handle(inbox.get() if self.is_paused else idle.next_message(inbox))
            if self._delivery.due:
                self._delivery.flush()  # the next message may come much later
            if not goes_on:
                return False
        return True

    def _handle(self, message: LoopMessage) -> bool:
        match message:
            case Submit(requests):
                self._unqueued.extend(requests)
            case Abort(request_id):
                tracked = self._requests.find(request_id)
                if tracked is not None:
                    self._steps.end(tracked, "abort")
            case LoopCall():
                message.run(self._steps.commit_all)
            case Stop():
                self.end_all(StoppedError("the engine was closed before the request finished"))
                return False
        return True

    def _recover(self, error: BaseException) -> bool:
        """End the requests of the failed step with an error, and start again with new arrays.
        Returns False when that fails too.

        When no step was being launched or read, every running request ends with the error. When no
        request is running either, the failure would happen again for the waiting requests, so these
        end with it. A request that failed while being queued ends alone.
        """
        cause = failure("a step", error)
        try:
            submitted, self._submitted = self._submitted, None
            if submitted is not None:
                if self._requests.find(submitted.request.request_id) is submitted:
                    self._requests.drop(submitted)
                if not submitted.has_ended:
                    submitted.put(TokenEvent((), "error", error=cause))
                return True
            failed = self._steps.planner.current_requests
            if failed is None:
                failed = list(self._requests.running.values()) or self._requests.everything
            for tracked in failed:
                if not tracked.has_ended:
                    self._steps.end(tracked, "error", cause)
            self._steps.restart()
        except BaseException as last:  # the engine is lost: answer all who wait
            log.exception("the engine cannot start again")
            self._give_up(cause, last)
            return False
        return True

    def _give_up(self, cause: EnginebayError, last: BaseException) -> None:
        """Answer every request and call with an error, and refuse later messages."""
        self._inbox.close(f"the engine broke down ({error_line(last)}): make a new one")
        for tracked in self._requests.everything:
            tracked.finished = True
            tracked.put(TokenEvent((), "error", tracked.metrics, cause))
        for tracked in self._unqueued:
            tracked.put(TokenEvent((), "error", error=cause))
        self._unqueued.clear()
        self._requests.waiting.clear()
        self._requests.running.clear()
        self._inbox.refuse_all(cause)


def _check_process(made_in: int) -> None:
    """Raise StoppedError in a forked child of process `made_in`, which has no loop thread."""
    if os.getpid() != made_in:
        raise StoppedError(
            f"an engine of process {made_in}, used in its forked child {os.getpid()}",
            "engines in the process that made them: a fork has none of their threads",
            'Start children with multiprocessing.get_context("spawn"), and make the LLM there.',
        )
