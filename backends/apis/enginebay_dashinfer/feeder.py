"""QueueFeeder: brings the events of a running model's requests to their queues."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from enginebay.serving.events import Event, Inbound, LoopWakers, RequestEnded
from enginebay.serving.running import Wake
from enginebay_dashinfer.result_queue import ResultQueue


class QueueFeeder:
    """Reads the events of all requests in one place, once per step of the engine, and wakes the
    readers of the requests that have news. It does so on the loop's delivery thread, because each
    further thread delays a token by the time that the system takes to run it. Any thread may call
    the methods.
    """

    def __init__(self) -> None:
        self._inbound = Inbound()
        self._queues: dict[str, ResultQueue] = {}
        self._emptied = threading.Condition()
        self._wake: Wake = self._deliver_all

    def connect(self, wakers: LoopWakers) -> tuple[Inbound, Callable[[], Wake]]:
        """Return the Inbound for the events of a request, and a function that returns the callback
        which delivers the events.
        """
        wake = self._wake  # one object, so that a step calls it once for all requests
        return self._inbound, lambda: wake

    def add(self, queues: Mapping[str, ResultQueue], submit: Callable[[QueueFeeder], None]) -> None:
        """Add requests by id, which `submit` queues; when it raises, none is added."""
        self._queues |= queues
        try:
            submit(self)
        except BaseException:
            for request_id in queues:
                self._queues.pop(request_id, None)
            raise

    def close(self) -> None:
        """Wait until every request has ended and its queue has its last event."""
        with self._emptied:
            self._emptied.wait_for(lambda: not self._queues)
        self._inbound.close()

    def _deliver_all(self) -> None:
        for event in self._inbound.take():
            self._deliver(event)

    def _deliver(self, event: Event) -> None:
        queue = self._queues.get(event.request_id)
        if queue is not None:
            queue.put(event)
        if isinstance(event, RequestEnded):
            with self._emptied:
                self._queues.pop(event.request_id, None)
                self._emptied.notify_all()
