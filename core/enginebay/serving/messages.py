"""Messages from other threads to the engine thread."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from enginebay.errors import EnginebayError, StoppedError
from enginebay.plugins.blame import failure
from enginebay.serving.running import Running, TokenEvent


@dataclasses.dataclass(frozen=True, slots=True)
class Submit:
    """Queue requests that were submitted together. No step begins between the first and the last,
    so the error of any of them does not wait for a step of the others.
    """

    requests: Sequence[Running]


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
                case Submit(requests):
                    for request in requests:
                        request.put(TokenEvent((), "error", error=error))
                case LoopCall(_, result):
                    if result.set_running_or_notify_cancel():
                        result.set_exception(error)
