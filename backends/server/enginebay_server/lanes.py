"""Lanes: the threads on which requests are read and prepared, so that a slow one delays only
requests of its own kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from enginebay.serving.reading import answered

Result = TypeVar("Result")
LaneJob = Callable[[], Any]

LARGE_BYTES = 64 * 1024
"""A larger body is read and prepared on the lane of large requests, one request at a time."""

LARGE_VALUES = 8192
"""An answer with more token ids and log-probabilities is written on the lane of large requests."""

IS_LARGE = "enginebay.is_large"
"""The key of a request's scope that is True for a large body."""


class _Job:
    """A call whose outcome a future of an event loop gets. It holds the future until then: the
    traceback of an exception holds the job, and all that its frames hold, such as a large body,
    would stay until the next garbage collection.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], call: LaneJob
    ) -> None:
        self._loop, self._call = loop, call
        self._future: asyncio.Future[Any] | None = future

    def __call__(self) -> None:
        """Call the function, unless its caller was cancelled. Runs on a thread of the lane."""
        if self._future is None or self._future.cancelled():
            return
        try:
            result = self._call()
        except BaseException as error:  # noqa: BLE001  # the caller's task gets it
            self._finish(None, error)
        else:
            self._finish(result, None)

    def _finish(self, result: Any, error: BaseException | None) -> None:
        future, self._future = self._future, None
        assert future is not None, "a job has one outcome"
        # A closed event loop has no request that waits for the outcome.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_settle, future, result, error)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Set the outcome of a future, unless its caller was cancelled."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


class Lane:
    """Runs functions on a few daemon threads, first come, first served.

    The process can end while a function runs, which threads of an Executor would prevent. The
    threads end with the lane.
    """

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._name = name
        self._num_threads = num_threads
        self._jobs: queue.SimpleQueue[LaneJob | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, _end, self._jobs, self._threads)

    async def run(self, function: Callable[..., Result], *args: Any) -> Result:
        """Return the result of a function, or raise its exception. A call that is cancelled before
        its turn is left out.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._start()
        self._jobs.put(_Job(loop, future, functools.partial(answered, function, *args)))
        try:
            return await future
        finally:
            del future  # its exception's traceback has this frame

    def close(self) -> None:
        """End the threads after the functions that were given to them. Does not wait."""
        _end(self._jobs, self._threads)

    def _start(self) -> None:
        while len(self._threads) < self._num_threads:
            number = len(self._threads)
            name = f"enginebay-{self._name}-{number}"
            thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()


def _work(jobs: queue.SimpleQueue[LaneJob | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # its request may be large


def _end(jobs: queue.SimpleQueue[LaneJob | None], threads: list[threading.Thread]) -> None:
    for _ in threads:
        jobs.put(None)
    threads.clear()


class Lanes:
    """The lanes of one server, by the kind of work."""

    def __init__(self) -> None:
        self.small = Lane("small", num_threads=4)
        """Prompts of small requests."""
        self.large = Lane("large")
        """Bodies of more than LARGE_BYTES, and long answers: one at a time, so that one core and
        the memory of one such request are in use.
        """
        self.guided = Lane("guided", num_threads=2)
        """Small requests with a constraint, whose grammar may take seconds to compile."""
        self.adapters = Lane("adapters")
        """Adapters that are loaded or unloaded."""
        self.files = Lane("files")
        """Files of the page."""
        self.ending = Lane("ending")
        """Engines that are closed."""
        self._all = (
            self.small, self.large, self.guided, self.adapters, self.files, self.ending
        )  # fmt: skip

    def of(self, scope: Mapping[str, Any], *, has_form: bool = False) -> Lane:
        """Return the lane on which a request is prepared."""
        if scope.get(IS_LARGE):
            return self.large
        return self.guided if has_form else self.small

    async def read(self, scope: Mapping[str, Any], function: Callable[[], Result]) -> Result:
        """Return the result of a function that converts a request's body: on the lane of large
        requests for a large body, else at once.
        """
        return await self.large.run(function) if scope.get(IS_LARGE) else function()

    async def write(self, num_values: int, function: Callable[..., Result], *args: Any) -> Result:
        """Return the result of a function that writes an answer with a number of token ids and
        log-probabilities: on the lane of large requests for a long answer, else at once.
        """
        long = num_values > LARGE_VALUES
        return await self.large.run(function, *args) if long else function(*args)

    def close(self) -> None:
        """End the threads when they have finished their functions. Does not wait for them."""
        for lane in self._all:
            lane.close()
