"""What crosses the border of the engine thread: a request down, tokens up, and a few control messages."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from enginebay.errors import EnginebayError
from enginebay.types import FinishReason, Request, RequestMetrics


@dataclasses.dataclass(frozen=True, slots=True)
class TokenEvent:
    """New tokens of a request; the last event has a finish reason, and an error when the reason is "error"."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    metrics: RequestMetrics | None = None
    error: EnginebayError | None = None


class Ticket:
    """The outbox of one request: events in order, unbounded, so that a slow reader slows nobody and loses nothing."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        self._listener: Callable[[], None] | None = None

    def put(self, event: TokenEvent) -> None:
        """Called by the engine thread."""
        self._events.put(event)
        listener = self._listener
        if listener is not None:
            listener()

    def get(self, timeout_s: float | None = None) -> TokenEvent:
        """The next event; queue.Empty when none came within timeout_s."""
        return self._events.get(timeout=timeout_s)

    def get_nowait(self) -> TokenEvent:
        """The next event, or queue.Empty."""
        return self._events.get_nowait()

    def listen(self, listener: Callable[[], None]) -> None:
        """Have `listener` called, on the engine thread, after each event from now on; it must not block."""
        self._listener = listener


@dataclasses.dataclass(frozen=True, slots=True)
class Submit:
    """Queue a request."""

    ticket: Ticket


@dataclasses.dataclass(frozen=True, slots=True)
class Abort:
    """End a request, wherever it is; nothing happens when it has ended already."""

    request_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """Run a function on the engine thread, between steps, with every launched step read."""

    function: Callable[[], Any]
    result: Future[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """End the thread; requests under way are failed."""


Message = Submit | Abort | Call | Stop
