"""Reading: streams of one prompt's chunks over Events, and what is done on other threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from enginebay.blame import failure
from enginebay.errors import RequestError
from enginebay.llm.events import AsyncEvents, Event, Events
from enginebay.outputs import RequestOutput, StreamChunk

Result = TypeVar("Result")


def output_in(event: Event) -> RequestOutput:
    """The output of a request that has ended. Raises its error."""
    assert not isinstance(event, StreamChunk), "a request without a stream has one event"
    if event.error is not None:
        raise event.error
    assert event.output is not None, "a request ends with an error or an output"
    return event.output


def pooled_of(output: RequestOutput, *, normalize: bool) -> np.ndarray:
    """The pooled hidden states that an output has, f32 [hidden_size]; one of length 0 stays so."""
    hidden = output.hidden
    assert hidden is not None, "a request with a pooling ends with hidden states"
    length = float(np.linalg.norm(hidden)) if normalize else 1.0
    return hidden / np.float32(length or 1.0)


class Stream(Iterator[StreamChunk]):
    """The chunks of one prompt's completions. Any thread may close it; closing it, or letting go of
    it, ends the request.
    """

    def __init__(self, events: Events) -> None:
        self._events = events

    def __next__(self) -> StreamChunk:
        goes_on = False
        try:
            event = next(self._events)
            goes_on = isinstance(event, StreamChunk)
            if isinstance(event, StreamChunk):
                return event
            output_in(event)
            raise StopIteration
        finally:
            if not goes_on:
                self.close()

    def close(self) -> None:
        """End the request, if it has not ended. A thread that waits for a chunk gets
        StopIteration.
        """
        self._events.close()


class AsyncStream(AsyncIterator[StreamChunk]):
    """A Stream for asyncio. `begin` queues the request, when the first chunk is asked for."""

    def __init__(self, begin: Callable[[AsyncEvents], Awaitable[object]]) -> None:
        self._begin = begin
        self._events: AsyncEvents | None = None
        self._is_closed = False

    async def __anext__(self) -> StreamChunk:
        goes_on = False
        try:
            event = await self._next()
            goes_on = isinstance(event, StreamChunk)
            if isinstance(event, StreamChunk):
                return event
            output_in(event)
            raise StopAsyncIteration
        finally:
            if not goes_on:
                await self.aclose()

    async def _next(self) -> Event:
        if self._is_closed:
            raise StopAsyncIteration
        if self._events is None:
            self._events = AsyncEvents()
            try:
                await self._begin(self._events)
            except RequestError:
                if self._is_closed:
                    raise StopAsyncIteration from None
                raise
        return await anext(self._events)

    async def aclose(self) -> None:
        """End the request, if it has not ended. A task that waits for a chunk gets
        StopAsyncIteration.
        """
        self._is_closed = True
        if self._events is not None:
            self._events.close()


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
