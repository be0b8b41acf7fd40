"""Stream and AsyncStream: the chunks of one prompt, read from its Events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from enginebay.errors import RequestError
from enginebay.outputs import RequestOutput, StreamChunk
from enginebay.plugins.blame import failure
from enginebay.serving.events import AsyncEvents, Event, Events

Result = TypeVar("Result")


def output_in(event: Event) -> RequestOutput:
    """The output of a RequestEnded event. Raises its error, if it has one."""
    assert not isinstance(event, StreamChunk), "a request without a stream has one event"
    if event.error is not None:
        raise event.error
    assert event.output is not None, "a request ends with an error or an output"
    return event.output


def pooled_of(output: RequestOutput, *, normalize: bool) -> np.ndarray:
    """The pooled hidden states of an output, f32 [hidden_size]. An array of length 0 is not
    divided.
    """
    hidden = output.hidden
    assert hidden is not None, "a request with a pooling ends with hidden states"
    length = float(np.linalg.norm(hidden)) if normalize else 1.0
    return hidden / np.float32(length or 1.0)


class Stream(Iterator[StreamChunk]):
    """An iterator over the chunks of one prompt's completions. Closing it (from any thread) or
    dropping it ends the request.
    """

    def __init__(self, events: Events) -> None:
        self._events = events

    def __next__(self) -> StreamChunk:
        try:
            if isinstance(event := next(self._events), StreamChunk):
                return event
            output_in(event)
            raise StopIteration
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the request, if it has not ended. A thread that waits for a chunk gets a
        StopIteration.
        """
        self._events.close()


class AsyncStream(AsyncIterator[StreamChunk]):
    """An async iterator over the chunks of one prompt. `begin` queues the request, when the first
    chunk is awaited.
    """

    def __init__(self, begin: Callable[[AsyncEvents], Awaitable[object]]) -> None:
        self._begin = begin
        self._events: AsyncEvents | None = None
        self._is_closed = False

    async def __anext__(self) -> StreamChunk:
        try:
            if isinstance(event := await self._next(), StreamChunk):
                return event
            output_in(event)
            raise StopAsyncIteration
        except BaseException:
            await self.aclose()
            raise

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
    """Run a function on a worker thread, and return its result. An exception that would end a
    thread, such as SystemExit, is raised as InternalError.
    """
    return await asyncio.to_thread(answered, function, *args)


def answered(function: Callable[..., Result], *args: Any) -> Result:
    """Return the result of a function. An exception that would end a thread or an event loop, such
    as SystemExit, is raised as InternalError.
    """
    try:
        return function(*args)
    except Exception:
        raise
    # asyncio would stop the whole event loop, with all its other tasks.
    except BaseException as error:
        raise failure("preparing a request", error) from error
