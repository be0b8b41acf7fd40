"""Reading: news of completions from the delivery thread, to callers that wait for their ends or
read them as streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

from enginebay.blame import failure
from enginebay.errors import EnginebayError
from enginebay.llm.assemble import CompletionReader
from enginebay.loop.messages import Take, TokenEvent
from enginebay.outputs import RequestMetrics, StreamChunk


@dataclasses.dataclass(slots=True)
class News:
    """A new chunk of a completion, or the error that it ended with. `metrics` are the engine
    thread's until the end.
    """

    reader: CompletionReader
    chunk: StreamChunk | None
    metrics: RequestMetrics | None
    error: EnginebayError | None = None


Result = TypeVar("Result")
Tell = Callable[[News], None]
Readers = Sequence[CompletionReader]
Abandon = Callable[[Readers], None]


def takes(readers: Readers, tell: Tell, *, only_ends: bool) -> list[Take]:
    """For each reader what makes text of its events, and calls `tell` with each chunk, or with
    `only_ends` the last one.
    """
    return [_take(reader, tell, only_ends=only_ends) for reader in readers]


def _take(reader: CompletionReader, tell: Tell, *, only_ends: bool) -> Take:
    def take(event: TokenEvent) -> None:
        if reader.done:
            return
        if event.error is not None:
            reader.finish_reason = "error"
            tell(News(reader, None, event.metrics, event.error))
            return
        chunk = reader.feed(event)
        if reader.done or (chunk is not None and not only_ends):
            tell(News(reader, chunk, event.metrics))

    return take


class Ends:
    """Which groups of completions have not ended."""

    def __init__(self, groups: Sequence[Readers]) -> None:
        self._group = {reader: index for index, readers in enumerate(groups) for reader in readers}
        self._left = [len(readers) for readers in groups]
        self.num_left = len(groups)

    def note(self, news: News) -> int | None:
        """Take note of the end of a completion: the index of its group when that has ended too.
        Raises the completion's error.
        """
        if news.error is not None:
            raise news.error
        index = self._group[news.reader]
        self._left[index] -= 1
        if self._left[index]:
            return None
        self.num_left -= 1
        return index

    def wait(self, get: Callable[[], News]) -> Iterator[int]:
        """The index of each group, in the order in which they end. Raises the first error at once."""
        while self.num_left:
            index = self.note(get())
            if index is not None:
                yield index


class Stream(Iterator[StreamChunk]):
    """The chunks of one prompt's completions. Any thread may close it; closing it, or letting go of
    it, ends the request.
    """

    def __init__(
        self, news: queue.SimpleQueue[News | None], readers: Readers, abandon: Abandon
    ) -> None:
        self._news = news
        self._num_left = len(readers)
        self._end = weakref.finalize(self, abandon, readers)
        self._end.atexit = False

    def __next__(self) -> StreamChunk:
        goes_on = False
        try:
            while self._num_left:
                news = self._news.get()
                if news is None:
                    break
                if news.error is not None:
                    raise news.error
                assert news.chunk is not None, "news without an error has a chunk"
                self._num_left -= news.chunk.finish_reason is not None
                goes_on = True
                return news.chunk
            raise StopIteration
        finally:
            if not goes_on:
                self.close()

    def close(self) -> None:
        """End the request, if it has not ended. A thread that waits for a chunk gets StopIteration."""
        self._end()
        self._num_left = 0
        self._news.put(None)  # whoever waits, or comes later


class AsyncStream(AsyncIterator[StreamChunk]):
    """A Stream for asyncio. `begin` queues the request, when the first chunk is asked for, and
    returns its readers.
    """

    def __init__(self, begin: Callable[[Tell], Awaitable[Readers]], abandon: Abandon) -> None:
        self._begin, self._abandon = begin, abandon
        self._news: asyncio.Queue[News | None] = asyncio.Queue()
        self._end: weakref.finalize | None = None
        self._num_left: int | None = None

    async def __anext__(self) -> StreamChunk:
        goes_on = False
        try:
            if self._num_left is None:
                readers = await self._begin(tell_on_loop(self._news))
                self._end = weakref.finalize(self, self._abandon, readers)
                self._end.atexit = False
                self._num_left = len(readers)
            news = await self._news.get() if self._num_left else None
            if news is None:
                raise StopAsyncIteration
            if news.error is not None:
                raise news.error
            assert news.chunk is not None, "news without an error has a chunk"
            self._num_left -= news.chunk.finish_reason is not None
            goes_on = True
            return news.chunk
        finally:
            if not goes_on:
                await self.aclose()

    async def aclose(self) -> None:
        """End the request, if it has not ended. A task that waits for a chunk gets
        StopAsyncIteration.
        """
        self._num_left = 0
        if self._end is not None:
            self._end()
        self._news.put_nowait(None)


def tell_on_loop(news: asyncio.Queue[News] | asyncio.Queue[News | None]) -> Tell:
    """What puts news into a queue of the running event loop, from any thread."""
    loop = asyncio.get_running_loop()

    def tell(one: News) -> None:
        with contextlib.suppress(
            RuntimeError
        ):  # the event loop was closed, so nobody reads any more
            loop.call_soon_threadsafe(news.put_nowait, one)

    return tell


async def in_thread(function: Callable[..., Result], *args: Any) -> Result:
    """What a function returns on a thread of its own. What would end a thread, such as SystemExit,
    is an InternalError here.
    """
    return await asyncio.to_thread(_answered, function, *args)


def _answered(function: Callable[..., Result], *args: Any) -> Result:
    try:
        return function(*args)
    except Exception:
        raise
    except (
        BaseException
    ) as error:  # the thread's edge: the event loop would end, with all its other tasks
        raise failure("preparing a request", error) from error
