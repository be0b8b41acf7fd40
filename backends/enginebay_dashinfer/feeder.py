"""QueueFeeder: the thread that brings the events of a running model's requests to their queues."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from enginebay.llm.events import Event, Events, RequestEnded
from enginebay_dashinfer.result_queue import ResultQueue


class QueueFeeder:
    """Reads the events of all requests in one place: a step of the engine wakes this thread once,
    and it wakes the readers of the requests that have news. Any thread may call the methods.
    """

    def __init__(self, name: str) -> None:
        """`name`: of the thread."""
        self._events = Events()
        self._queues: dict[str, ResultQueue] = {}
        self._emptied = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"results of {name}", daemon=True)
        self._thread.start()

    def add(self, queues: Mapping[str, ResultQueue], submit: Callable[[Events], None]) -> None:
        """Add requests by id, which `submit` queues; when it raises, none is added."""
        self._queues |= queues
        try:
            submit(self._events)
        except BaseException:
            for request_id in queues:
                self._queues.pop(request_id, None)
            raise

    def close(self) -> None:
        """Wait until every request has ended and its queue has its last event, and end the
        thread.
        """
        with self._emptied:
            self._emptied.wait_for(lambda: not self._queues)
        self._events.close()
        self._thread.join()

    def _run(self) -> None:
        while events := self._events.get():
            for event in events:
                self._deliver(event)

    def _deliver(self, event: Event) -> None:
        queue = self._queues.get(event.request_id)
        if queue is not None:
            queue.put(event)
        if isinstance(event, RequestEnded):
            with self._emptied:
                self._queues.pop(event.request_id, None)
                self._emptied.notify_all()
