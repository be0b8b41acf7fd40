"""Server-sent events: an answer that is sent while its tokens are generated."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from enginebay.errors import EnginebayError
from enginebay.outputs import StreamChunk
from enginebay.serving.events import RequestEnded
from enginebay_server.errors import ApiError, api_error
from enginebay_server.generation import Generation, gone

log = logging.getLogger("enginebay.server")

FINAL_EVENT_TIMEOUT_S = 1.0
"""Max seconds to send the error that ends a stream."""

DONE = b"data: [DONE]\n\n"


class StreamWriter(ABC):
    """Makes the bytes of one stream. It belongs to one event loop."""

    @abstractmethod
    def begin(self) -> bytes:
        """Return the bytes before the first token."""

    @abstractmethod
    def write(self, place: int, chunk: StreamChunk) -> bytes:
        """Return the events of a chunk of the job at `place`; b"" if there is nothing to send."""

    @abstractmethod
    async def end(self) -> bytes:
        """Return the bytes after the end of the last job."""

    @abstractmethod
    def fail(self, error: ApiError) -> bytes:
        """Return the event of an error, which is the last one of the stream."""


class EventStream(Response):
    """Sends the events of a generation that was submitted for a stream, and closes it at the end.

    An error becomes an event, and the stream ends. When the client leaves, the generation is closed
    at once.
    """

    def __init__(
        self,
        generation: Generation,
        writer: StreamWriter,
        end_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """The stream ends with an error at the time `end_s` of the event loop's clock."""
        super().__init__(
            None,
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})},
        )
        del self.headers["content-length"]
        self._generation = generation
        self._writer = writer
        self._end_s = end_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(gone(receive))
        watcher.add_done_callback(lambda _: self._generation.close())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with asyncio.timeout_at(self._end_s):
                last = await self._send_events(send)
                await send({"type": "http.response.body", "body": last, "more_body": False})
        except TimeoutError:
            self._generation.close()
            error = ApiError(504, "the request took longer than the server allows")
            last = self._fail(error)
            with contextlib.suppress(TimeoutError):  # a client that does not read blocks this too
                async with asyncio.timeout(FINAL_EVENT_TIMEOUT_S):
                    await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            watcher.cancel()
            self._generation.close()

    async def _send_events(self, send: Send) -> bytes:
        """Send all bytes but the last ones, and return those."""
        left = len(self._generation.handles)
        writer, place_of = self._writer, self._generation.place_of
        ready = [writer.begin()]
        try:
            while left:
                events = await self._generation.get()
                if not events:
                    return b""  # the client left
                for event in events:
                    if isinstance(event, RequestEnded):
                        left -= 1
                        if event.error is not None:
                            raise event.error
                    else:
                        ready.append(writer.write(place_of(event), event))
                body = b"".join(ready)
                ready = []
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            return await writer.end()
        except (ApiError, EnginebayError) as error:
            log.warning("request %s failed in its stream: %s", self._generation.id, error)
            return b"".join(ready) + self._fail(api_error(error))
        except Exception as error:  # the status was sent already, so an event reports the error
            log.exception("request %s failed in its stream", self._generation.id)
            return b"".join(ready) + self._fail(api_error(error))

    def _fail(self, error: ApiError) -> bytes:
        """Return the event of an error, which becomes that of the request's span too."""
        if self._generation.span is not None:
            self._generation.span.error = error
        return self._writer.fail(error)
