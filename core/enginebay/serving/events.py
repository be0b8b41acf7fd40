"""Events: the output of any number of requests, read in one place by a thread or by asyncio."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import queue
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Protocol

from enginebay.errors import EnginebayError
from enginebay.outputs import RequestOutput, StreamChunk
from enginebay.serving.running import Wake


@dataclasses.dataclass(frozen=True, slots=True)
class RequestEnded:
    """The last event of a request: its whole output, or the error that ended it.

    Exactly one of `output` and `error` is set. An aborted request has an output: its completions
    have the finish reason "abort" and the text generated before the abort.
    """

    request_id: str
    output: RequestOutput | None = None
    error: EnginebayError | None = None


Event = StreamChunk | RequestEnded
"""A StreamChunk has new text and tokens of one completion; the completion's last chunk has a finish
reason.
"""


class Source(Protocol):
    """A request whose events an Inbound collects."""

    def read(self) -> list[Event]:
        """Return the events since the last call, with one chunk per completion."""

    def abandon(self) -> None:
        """End the request, if it has not ended: its reader is closed."""


class Inbound:
    """The requests of one reader that have unread events. Any thread may call its methods.

    Requests refer to this object and never to the reader. So a reader can be garbage-collected
    while its requests run, which ends them.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._open: dict[Source, None] = {}
        self._unread: collections.deque[Source] = collections.deque()
        self._lock = threading.Lock()

    @property
    def has_open(self) -> bool:
        """Whether any request has not ended, or its last event is unread."""
        return bool(self._open)

    def add(self, source: Source) -> None:
        """Add a request, whose events will follow."""
        self._open[source] = None

    def remove(self, source: Source) -> None:
        """Remove a request, which will have no more events."""
        self._open.pop(source, None)

    def put(self, source: Source) -> None:
        """A request has unread events. Those of a closed reader are never read."""
        if not self.is_closed:
            self._unread.append(source)

    def take(self) -> list[Event]:
        """All unread events. Chunks of one completion are joined into one."""
        sources: dict[Source, None] = {}
        found: list[Event] = []
        with self._lock:
            with contextlib.suppress(IndexError):
                while True:
                    sources[self._unread.popleft()] = None
            for source in sources:
                found += (events := source.read())
                if events and isinstance(events[-1], RequestEnded):
                    self.remove(source)
        return found

    def close(self) -> None:
        """End the requests that have not ended, and drop unread events."""
        self.is_closed = True
        self._unread.clear()
        for source in list(self._open):
            source.abandon()
        self._open.clear()


class EventReader(Protocol):
    """Reads the events of requests: Events, AsyncEvents, or an object of a documented API."""

    def connect(self, wakers: LoopWakers) -> tuple[Inbound, Callable[[], Wake]]:
        """Return the Inbound for a request's events, and a function that returns the callback which
        wakes the reader. The loop's delivery thread calls the callback, once per step.
        """


class Events(Iterator[Event]):
    """Receives the events of all requests that are submitted with it, and lets any thread read
    them.

    Pass it to `LLM.submit(prompt, events=...)`, then call get() in a loop or iterate over it. The
    iteration ends when every request has ended. Events of one completion come in order, each once;
    the RequestEnded of a request comes with the last chunk of its last completion.

    One wake-up returns the events of a whole engine step, for all requests. A slow reader delays no
    other reader: its unread chunks are joined, so the memory that they take is bounded by the
    output of its requests. Closing or dropping this object ends its requests.
    """

    def __init__(self) -> None:
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._inbound = inbound = Inbound()
        self._unread: collections.deque[Event] = collections.deque()
        self._wake: Wake = functools.partial(self._signals.put, None)
        self._end = weakref.finalize(self, inbound.close)
        self._end.atexit = False

    def get(self, timeout_s: float | None = None) -> list[Event]:
        """Wait for events, and return all unread ones. The list is empty after close(), and when no
        event came within `timeout_s` seconds.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._inbound.is_closed:
            left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            try:
                self._signals.get(timeout=left_s)
            except queue.Empty:
                return []
            events = self._inbound.take()
            if events:
                return events
        self._wake()  # wake the next waiting thread too
        return []

    def __next__(self) -> Event:
        while True:
            with contextlib.suppress(IndexError):  # another thread may close it meanwhile
                return self._unread.popleft()
            if not self._inbound.has_open:
                raise StopIteration
            self._unread.extend(self.get())

    def close(self) -> None:
        """End the requests of this object. Threads that wait in get() receive an empty list;
        submitting further requests with this object raises RequestError.
        """
        self._end()
        self._unread.clear()
        self._wake()

    def connect(self, wakers: LoopWakers) -> tuple[Inbound, Callable[[], Wake]]:
        """Return the Inbound for a request's events, and a function that returns the callback which
        wakes the reader.
        """
        wake = self._wake
        return self._inbound, lambda: wake


class AsyncEvents(AsyncIterator[Event]):
    """Events for asyncio: belongs to the event loop that is running when it is created.

    Use `await events.get()` or `async for`. All AsyncEvents of one event loop and one LLM are woken
    with one callback per engine step. `LLM.submit` may be called from another thread.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._inbound = inbound = Inbound()
        self._unread: collections.deque[Event] = collections.deque()
        self._end = weakref.finalize(self, inbound.close)
        self._end.atexit = False

    async def get(self) -> list[Event]:
        """Wait for events, and return all unread ones; an empty list after close()."""
        while not self._inbound.is_closed:
            self._ready.clear()
            events = self._inbound.take()
            if events:
                return events
            await self._ready.wait()
        return []

    async def __anext__(self) -> Event:
        while True:
            with contextlib.suppress(IndexError):  # another thread may close it meanwhile
                return self._unread.popleft()
            if not self._inbound.has_open:
                raise StopAsyncIteration
            self._unread.extend(await self.get())

    def close(self) -> None:
        """End the requests of this object; any thread may call this. Tasks that wait in get()
        receive an empty list; submitting further requests with this object raises RequestError.
        """
        self._end()
        self._unread.clear()
        with contextlib.suppress(RuntimeError):  # the event loop was closed: no task waits
            self._loop.call_soon_threadsafe(self._ready.set)

    def connect(self, wakers: LoopWakers) -> tuple[Inbound, Callable[[], Wake]]:
        """Return the Inbound for a request's events, and a function that returns the callback which
        wakes the reader.
        """
        waker = wakers.of(self._loop)
        return self._inbound, functools.partial(waker.mark, self._ready)


class LoopWaker:
    """Wakes the readers of one asyncio event loop, all with a single callback. Belongs to the
    delivery thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._due: dict[asyncio.Event, None] = {}

    def mark(self, ready: asyncio.Event) -> Wake:
        """Mark a reader: the next wake() wakes it."""
        self._due[ready] = None
        return self.wake

    def wake(self) -> None:
        """Wake the marked readers."""
        due, self._due = self._due, {}
        loop = self._loop()
        if loop is not None and due:
            with contextlib.suppress(RuntimeError):  # the event loop was closed: no task waits
                loop.call_soon_threadsafe(_set_all, due)


class LoopWakers:
    """The LoopWaker of each asyncio event loop that reads requests of one LLM."""

    def __init__(self) -> None:
        self._wakers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaker] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()

    def of(self, loop: asyncio.AbstractEventLoop) -> LoopWaker:
        """The LoopWaker of an event loop, created at the first call."""
        with self._lock:
            return self._wakers.setdefault(loop, LoopWaker(loop))


def _set_all(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        event.set()
