"""Records that cross between threads: requests to the engine thread, tokens back, and control
messages.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from enginebay.contracts.engine import TokenLogprobs
from enginebay.errors import EnginebayError, StoppedError
from enginebay.outputs import RequestMetrics
from enginebay.plugins.blame import failure
from enginebay.types import FinishReason, Request


# Not frozen, for the same reason as a RowPlan.
@dataclasses.dataclass(slots=True)
class TokenEvent:
    """New tokens of a request. The last event has a finish reason, and an error when the reason is
    "error".

    `logprobs`, for requests with log-probabilities, is [tokens or more, W]: W is the requested
    number of best tokens plus one. `prompt_logprobs`, [prompt tokens - 1, W], comes once, with the
    first token. `hidden`, f32 [hidden_size], comes with the last event of a request with a
    `pooling`.

    `metrics` belong to the engine thread until the last event: a reader that ends a request earlier
    takes a copy.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    metrics: RequestMetrics | None = None
    error: EnginebayError | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    hidden: np.ndarray | None = None


PutEvent = Callable[[TokenEvent], None]
Wake = Callable[[], None]
TakeEvent = Callable[[TokenEvent], Wake | None]
"""Receives the next event of a request. Returns the function that wakes the request's reader, or
None when there is nothing new to read.
"""


class Ticket:
    """The outbox of one request. Its events go to `put_event`, if there is one, and otherwise into
    an unbounded queue that get() reads.
    """

    def __init__(self, request: Request, put_event: PutEvent | None = None) -> None:
        self.request = request
        self.is_delivered = put_event is not None
        self.has_ended = False
        self._events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        self._put_event: PutEvent = put_event or self._events.put

    def put(self, event: TokenEvent) -> None:
        """Add an event. Called by the engine thread."""
        if event.finish_reason is not None:
            self.has_ended = True
        self._put_event(event)

    def get(self, timeout_s: float | None = None) -> TokenEvent:
        """The next event; queue.Empty when none came within `timeout_s` seconds."""
        return self._events.get(timeout=timeout_s)

    def get_nowait(self) -> TokenEvent:
        """The next event; queue.Empty when there is none."""
        return self._events.get_nowait()


@dataclasses.dataclass(frozen=True, slots=True)
class Submit:
    """Queue requests that were submitted together. No step begins between the first and the last,
    so the error of any of them does not wait for a step of the others.
    """

    tickets: Sequence[Ticket]


@dataclasses.dataclass(frozen=True, slots=True)
class Abort:
    """End a request, waiting or running; an ended one is ignored."""

    request_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class LoopCall:
    """Run a function on the engine thread between steps, after all launched steps were read."""

    function: Callable[[], Any]
    result: Future[Any]

    def run(self, before: Callable[[], None]) -> None:
        """Call `before` and then the function, unless the caller has gone. The caller gets the
        result or the error; an error of `before` is raised here too.
        """
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            before()
        except BaseException:
            self.result.set_exception(
                StoppedError("a step failed before the call could run: call again")
            )
            raise  # the loop handles the failed step
        try:
            self.result.set_result(self.function())
        except Exception as error:  # noqa: BLE001  # the caller gets it
            self.result.set_exception(error)
        except BaseException as error:  # noqa: BLE001  # raised in the caller, it would end the caller's thread
            cause = failure("a function that was run on the engine's thread", error)
            self.result.set_exception(cause)


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """End the thread; unfinished requests end with an error."""


LoopMessage = Submit | Abort | LoopCall | Stop


class Inbox:
    """Messages from other threads to the engine thread, in order. After close() no message can be
    put.
    """

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[LoopMessage] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._why_closed: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is no message."""
        return self._messages.empty()

    @property
    def is_closed(self) -> bool:
        """Whether it was closed; earlier messages may still be in it."""
        return self._why_closed is not None

    def put(self, *messages: LoopMessage) -> None:
        """Add all messages or none. StoppedError when it is closed."""
        with self._lock:
            if self._why_closed is not None:
                raise StoppedError(self._why_closed)
            for message in messages:
                self._messages.put(message)

    def get(self, timeout_s: float | None = None) -> LoopMessage:
        """The next message; queue.Empty when none came within `timeout_s` seconds."""
        return self._messages.get(timeout=timeout_s)

    def close(self, why: str, last: LoopMessage | None = None) -> None:
        """Add a last message, and refuse later ones: put() raises StoppedError with the text `why`.
        Does nothing when it is closed already.
        """
        with self._lock:
            if self._why_closed is None:
                self._why_closed = why
                if last is not None:
                    self._messages.put(last)

    def refuse_all(self, error: EnginebayError) -> None:
        """Answer every request and call that is still in it with an error."""
        while not self._messages.empty():
            match self._messages.get():
                case Submit(tickets):
                    for ticket in tickets:
                        ticket.put(TokenEvent((), "error", error=error))
                case LoopCall(_, result):
                    if result.set_running_or_notify_cancel():
                        result.set_exception(error)
