"""EngineLoop: the one thread that drives an engine."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from enginebay.blame import failure
from enginebay.config import EngineConfig
from enginebay.engine import Engine
from enginebay.errors import EnginebayError, RequestError, StoppedError, error_line
from enginebay.loop.delivery import Delivery
from enginebay.loop.messages import (
    Abort,
    Call,
    Inbox,
    Message,
    Stop,
    Submit,
    Take,
    Ticket,
    TokenEvent,
)
from enginebay.loop.observer import Observers
from enginebay.loop.request_table import RequestTable
from enginebay.loop.steps import StepRunner
from enginebay.proposer import Proposer
from enginebay.scheduler import Scheduler
from enginebay.types import Request

log = logging.getLogger("enginebay.loop")

MAX_IN_FLIGHT = 2
"""Launched but unread steps: one runs while the next one waits for the device, so that it is never
idle. One without `overlap_execution`.
"""

POLL_S = 0.002
"""How long to wait for news when a scheduler asks to wait although requests are queued."""


class EngineLoop:
    """Admits, schedules, launches and commits, on a thread of its own.

    One step is launched ahead of the one being read: decoding rows continue from the token that the
    device sampled, which the host learns later. Without `overlap_execution` each step is read
    before the next is launched. Every public method may be called from any thread.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        config: EngineConfig,
        proposer: Proposer | None = None,
        observers: Observers | None = None,
    ) -> None:
        """`proposer`: who drafts tokens, of an engine whose configuration names it; None: nobody.
        `observers`: those of the loop before this one; None: new ones, without an observer.
        """
        self.engine = engine
        self.scheduler = scheduler
        self._state = scheduler.initial_state()
        self._requests = RequestTable()
        self._delivery = Delivery(self.abort)
        self._steps = StepRunner(
            engine, config, self._requests, proposer, self._delivery.flush, observers
        )
        self._max_unread = MAX_IN_FLIGHT - 1 if config.overlap_execution else 0
        self.observers = self._steps.observers  # who is told of what the loop does
        self._inbox = Inbox()
        self._submitted: Ticket | None = None  # that which is being taken in
        self.is_paused = (
            False  # set by call(): while it is, messages are handled and nothing is launched
        )
        self._thread = threading.Thread(target=self._run, name="enginebay-loop", daemon=True)
        self._thread.start()

    # Called from any thread.

    @property
    def num_waiting(self) -> int:
        """Requests that hold no row, as of now."""
        return len(self._requests.waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold a row, as of now."""
        return len(self._requests.running)

    def submit(
        self, requests: Sequence[Request], takes: Sequence[Take] | None = None
    ) -> list[Ticket]:
        """Queue requests, all or none; StoppedError after close().

        `takes`: for each request a function that is called with its events as they come, on a
        thread of their own (see Delivery), until one of them has a finish reason. Without them the
        events wait in the tickets. RequestError with them on the engine's thread.
        """
        if takes is None:
            tickets = [Ticket(request) for request in requests]
        elif threading.current_thread() is self._thread:
            raise RequestError(
                "a request made on the engine's own thread, which would wait for itself",
                "requests from every other thread",
                "Make it outside of run_on_engine, observers and schedulers.",
            )
        else:
            each = zip(requests, takes, strict=True)
            tickets = [
                Ticket(request, self._delivery.outbox(request, take)) for request, take in each
            ]
        self._inbox.put(*(Submit(ticket) for ticket in tickets))
        return tickets

    def abort(self, request_id: str) -> None:
        """End a request with reason "abort" and free what it held; an ended or unknown one is left
        alone.
        """
        with contextlib.suppress(StoppedError):  # closing ends it too
            self._inbox.put(Abort(request_id))

    def call(self, function: Callable[[], Any]) -> Any:
        """Run `function` on the engine thread between steps, and return what it returns or raise
        what it raises.

        What would end a thread, such as SystemExit, is raised as InternalError here, and the engine
        thread goes on.
        """
        if threading.current_thread() is self._thread:
            return function()
        result: Future[Any] = Future()
        self._inbox.put(Call(function, result))
        try:
            return result.result()
        finally:
            result.cancel()  # a caller that was interrupted wants nothing run any more

    def close(self) -> None:
        """Fail what is under way, and end the threads. Closing twice is fine."""
        self._inbox.close("the engine was closed: make a new one to go on", last=Stop())
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._delivery.join()

    # The engine thread.

    def _run(self) -> None:
        going = True
        while going:
            try:
                going = self._turn()
            # The loop's outer edge: whatever a part raises, those who wait are answered.
            except BaseException as error:
                log.exception("a step failed")
                going = self._recover(error)
            self._delivery.flush()
        # A step that still runs gives arrays back to the interpreter when it ends; should that be
        # ending, the process aborts.
        for step in self._steps.in_flight:
            try:
                step.pending.read()
            except BaseException:  # no reader waits for its tokens, and the loop ends either way
                log.warning("a step failed while the loop was being closed", exc_info=True)
        self._delivery.close()

    def _turn(self) -> bool:
        """Take in messages, launch what the scheduler decides, read a step when it is time. False:
        stop.
        """
        if self._steps.awaits_ends:
            self._steps.awaits_ends = False
            # a step is running meanwhile: no row goes on whose text has ended
            self._delivery.catch_up()
        if not self._take_in():
            return False
        if self._steps.late:
            self._steps.settle_late()
        launched = False
        if not self._requests.is_empty:
            ledger = self.engine.ledger
            admission = self._steps.admission
            look_up = admission.num_cached if self.scheduler.needs_cached_tokens else None
            began_s = time.monotonic()
            view = self._requests.view(began_s, self._steps.limits(), look_up, forks=ledger.forks)
            decision, self._state = self.scheduler.decide(view, self._state)
            if self.observers.is_on:
                self.observers.decided(began_s)
            launched = self._steps.launch(decision)
            if self.observers.is_on:
                self.observers.carried_out(self._requests, ledger)
        if launched:
            while (
                len(self._steps.in_flight) > self._max_unread
            ):  # a decision may launch several steps
                self._steps.commit_next()
        elif self._steps.in_flight:
            self._steps.commit_next()
        elif not self._requests.is_empty:
            return self._wait_for_news()
        return True

    def _take_in(self) -> bool:
        """Handle all messages; wait for one while there is nothing to do, or all is paused. False:
        stop.
        """
        while self.is_paused or self._steps.is_idle or not self._inbox.is_empty:
            if self._inbox.is_closed and self._inbox.is_empty:
                return False  # stopping has failed half-way, and the rest has ended since
            goes_on = self._handle(self._inbox.get())
            self._delivery.flush()  # the next message may be long in coming
            if not goes_on:
                return False
        return True

    def _wait_for_news(self) -> bool:
        """The scheduler wants to wait, with nothing launched: for time to pass, or for a message.
        False: stop.
        """
        try:
            message = self._inbox.get(POLL_S)
        except queue.Empty:
            return True
        return self._handle(message)

    def _handle(self, message: Message) -> bool:
        match message:
            case Submit(ticket):
                self._submitted = ticket
                self._steps.add(ticket)
                self._submitted = None
            case Abort(request_id):
                tracked = self._requests.find(request_id)
                if tracked is not None:
                    self._steps.end(tracked, "abort")
            case Call(function, result):
                self._answer(function, result)
            case Stop():
                for tracked in self._requests.everything:
                    why = StoppedError("the engine was closed before the request finished")
                    self._steps.end(tracked, "error", why)
                return False
        return True

    def _answer(self, function: Callable[[], Any], result: Future[Any]) -> None:
        if not result.set_running_or_notify_cancel():
            return
        try:
            self._steps.commit_all()
        except BaseException:
            result.set_exception(
                StoppedError("a step failed before the call could run: call again")
            )
            raise  # the failed step is the loop's to handle
        try:
            result.set_result(function())
        except Exception as error:  # noqa: BLE001  # belongs to the caller, who gets it
            result.set_exception(error)
        except BaseException as error:  # noqa: BLE001  # the edge of a call: raised over there it would end the caller's thread
            result.set_exception(failure("a function that was run on the engine's thread", error))

    def _recover(self, error: BaseException) -> bool:
        """Fail the requests of the step that failed, and begin anew with fresh arrays. False: that
        failed too.

        When it was no step, every request that runs is failed. When none does, whatever failed
        would fail again for those that wait: then they are failed. A request that could not be
        taken in is failed alone.
        """
        cause = failure("a step", error)
        try:
            ticket, self._submitted = self._submitted, None
            if ticket is not None:
                self._requests.forget(ticket)
                if not ticket.has_ended:
                    ticket.put(TokenEvent((), "error", error=cause))
                return True
            at_work, running = self._steps.at_work, list(self._requests.running.values())
            for tracked in (running or self._requests.everything) if at_work is None else at_work:
                if not tracked.ticket.has_ended:
                    self._steps.end(tracked, "error", cause)
            self._steps.begin_anew()
        except BaseException as last:  # nothing can run any more, and those who wait are answered
            log.exception("the engine cannot begin anew")
            self._give_up(cause, last)
            return False
        return True

    def _give_up(self, cause: EnginebayError, last: BaseException) -> None:
        """Answer every request and call with an error, and take in nothing any more."""
        self._inbox.close(f"the engine broke down ({error_line(last)}): make a new one to go on")
        for tracked in self._requests.everything:
            tracked.finished = True
            tracked.ticket.put(TokenEvent((), "error", tracked.metrics, cause))
        self._requests.clear()
        self._inbox.refuse_all(cause)


def end_all(loop: EngineLoop, error: EnginebayError) -> None:
    """End every request of a loop with an error. On its thread only, see call()."""
    for tracked in loop._requests.everything:
        loop._steps.end(tracked, "error", error)


def running_prompts(loop: EngineLoop) -> set[str]:
    """The ids of prompts of which a completion holds a row, as of now. From any thread."""
    return {one.request.parent_id for one in list(loop._requests.running.values())}


def count_prompts(loop: EngineLoop) -> tuple[int, int]:
    """Prompts none of whose completions holds a row, and prompts of which one does, as of now. From
    any thread.
    """
    running = {one.request.parent_id or id(one) for one in list(loop._requests.running.values())}
    waiting = {one.request.parent_id or id(one) for one in list(loop._requests.waiting.values())}
    return len(waiting - running), len(running)
