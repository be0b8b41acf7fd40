"""Delivery: the thread that passes a loop's events to the functions that turn them into text."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable, Sequence

from enginebay.plugins.blame import failure
from enginebay.serving.running import Running, TokenEvent, Wake
from enginebay.waits import has_ended

log = logging.getLogger("enginebay.loop")

Delivered = tuple[Running, TokenEvent]
"""A request, and the next event for its `take`."""

CATCH_UP_S = 1.0
"""The longest time that the engine thread waits for earlier events to be handed over, even if a
tokenizer hangs.
"""


class Delivery:
    """Calls the `take` of each request with its events, in the order in which they were put. When
    `take` raises, the request is aborted, and `take` is called once more, with an error event.

    The engine thread only puts events, so making text costs it no time. Text is made even when its
    reader is slow, so a stop text is found without delay. Events of one step are handed over
    together: each reader is woken once for all of them. The thread ends after the engine thread has
    ended.
    """

    def __init__(self, abort: Callable[[str], None]) -> None:
        self._abort = abort
        self.due: list[Delivered] = []
        """Events that were put since the last flush."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._overdue: threading.Lock | None = None
        self._thread = threading.Thread(target=self._run, name="enginebay-delivery", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has ended, after close(); see has_ended."""
        if threading.current_thread() is not self._thread:
            has_ended(self._thread)

    # The engine thread.

    def flush(self) -> None:
        """Hand over the events that were put since the last flush."""
        if self.due:
            self._jobs.put(functools.partial(self._hand_over, tuple(self.due)))
            self.due.clear()

    def catch_up(self) -> None:
        """Wait until all events that were put so far have been handed over, at most CATCH_UP_S.
        After such a timeout, later calls do not wait until those events have been handed over.
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
        """End the thread after the events that were put so far."""
        self.flush()
        self._jobs.put(None)

    # The delivery thread.

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # an idle thread keeps no request alive

    def _hand_over(self, due: Sequence[Delivered]) -> None:
        wakes: dict[Wake, None] = {}
        for running, event in due:
            assert running.take is not None, "a request without `take` puts its events elsewhere"
            try:
                wake = running.take(event)
            # The thread's outer edge: whatever a tokenizer raises, the reader gets an error event.
            except BaseException as error:
                request_id = running.request.request_id
                log.exception(
                    "reading the events of request %s failed: the request is aborted", request_id
                )
                self._abort(request_id)
                cause = failure(f"reading the tokens of request {request_id}", error)
                wake = None
                with contextlib.suppress(Exception):
                    wake = running.take(TokenEvent((), "error", error=cause))
            if wake is not None:
                wakes[wake] = None
        for wake in wakes:
            wake()
