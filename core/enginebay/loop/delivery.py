"""Delivery: the thread that hands a loop's events to functions that make text of them."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable, Sequence

from enginebay.blame import failure
from enginebay.loop.messages import PutEvent, Take, TokenEvent, Wake
from enginebay.types import Request

log = logging.getLogger("enginebay.loop")

Delivered = tuple[str, Take, TokenEvent]
"""The id of a request, what takes its events, and the next one."""

CATCH_UP_S = 1.0
"""The engine thread waits at most this long for the delivery of what it has put, whatever a
tokenizer does.
"""


class Delivery:
    """Calls each request's function with its events, in the order in which they were put.

    The engine thread puts events and goes on, so text costs it nothing; readers find text ready, so
    a slow reader delays no stop text. Events of one step are handed over together: each reader is
    woken once for all of them. The thread ends when the engine thread has.
    """

    def __init__(self, abort: Callable[[str], None]) -> None:
        self._abort = abort
        self._due: list[Delivered] = []
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._overdue: threading.Lock | None = None
        self._thread = threading.Thread(target=self._run, name="enginebay-delivery", daemon=True)
        self._thread.start()

    def outbox(self, request: Request, take: Take) -> PutEvent:
        """What puts an event of a request, for `take` to be called with it on the delivery thread
        after flush().

        When `take` raises anything, the request is aborted, and `take` is called with an error
        event in its place.
        """
        return lambda event: self._due.append((request.request_id, take, event))

    def join(self) -> None:
        """Wait for the end of the thread, which comes after close()."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # The engine thread.

    def flush(self) -> None:
        """Hand over what was put since the last flush."""
        if self._due:
            due, self._due = self._due, []
            self._jobs.put(functools.partial(self._hand_over, due))

    def catch_up(self) -> None:
        """Wait until all that was put so far has been handed over, or CATCH_UP_S. While that is
        overdue, later calls do not wait.
        """
        if self._overdue is not None and not self._overdue.acquire(blocking=False):
            return
        self._overdue = None
        handed_over = threading.Lock()
        handed_over.acquire()
        self._jobs.put(handed_over.release)
        if not handed_over.acquire(timeout=CATCH_UP_S):
            self._overdue = handed_over

    def close(self) -> None:
        """End the thread after what was put so far."""
        self.flush()
        self._jobs.put(None)

    # The delivery thread.

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # an idle thread keeps no request alive

    def _hand_over(self, due: Sequence[Delivered]) -> None:
        wakes = {self._take(*one): None for one in due}
        for wake in wakes:
            if wake is not None:
                wake()

    def _take(self, request_id: str, take: Take, event: TokenEvent) -> Wake | None:
        try:
            return take(event)
        except (
            BaseException
        ) as error:  # the thread's edge: whatever a tokenizer raises, those who wait are answered
            log.exception("the events of request %s cannot be read: it is aborted", request_id)
            self._abort(request_id)
            cause = failure(f"reading the tokens of request {request_id}", error)
            with contextlib.suppress(Exception):
                return take(TokenEvent((), "error", error=cause))
        return None
