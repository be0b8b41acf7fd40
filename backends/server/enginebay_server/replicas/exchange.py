"""A small HTTP/1.1 client on asyncio, which passes an answer on as it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import httptools

MAX_UNREAD_BYTES = 1 << 20
"""The server waits while the reader has not taken this many bytes of an answer."""

Headers = Sequence[tuple[bytes, bytes]]


class BrokenError(Exception):
    """The connection was lost before the answer was complete."""


class Connection(asyncio.Protocol):
    """One connection to a server. It sends one request at a time; the caller reads an answer to its
    end before the next `send`. It belongs to one event loop.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._chunks: list[bytes] = []
        self._num_unread = 0
        self._has_head = self._is_complete = self._is_lost = False
        self._changed = asyncio.Event()

    @property
    def is_idle(self) -> bool:
        """Whether another request can be sent."""
        return self._is_complete and not self._is_lost

    async def send(
        self, method: str, target: str, headers: Headers, body: bytes = b""
    ) -> tuple[int, Headers]:
        """Send a request; return status and headers of its answer. `target` is the path, with the
        query. BrokenError without an answer.
        """
        self._parser = httptools.HttpResponseParser(self)
        self._headers, self._chunks, self._num_unread = [], [], 0
        self._has_head = self._is_complete = False
        if self._is_lost or self._transport is None:
            raise BrokenError("the connection is closed")
        lines = [b"%s %s HTTP/1.1" % (method.encode(), target.encode())]
        lines += [b"%s: %s" % header for header in headers]
        lines.append(b"content-length: %d\r\n\r\n" % len(body))
        self._transport.write(b"\r\n".join(lines) + body)
        while not self._has_head:
            await self._wait()
        if method == "HEAD":  # its answer has the length of a body, and no body
            self.close()
            self._is_complete = True
        return self._parser.get_status_code(), self._headers

    async def chunk(self) -> bytes:
        """Return the bytes of the answer that have arrived since the call before, at least one;
        b"" at the end. BrokenError if the connection is lost before the end.
        """
        while not self._chunks and not self._is_complete:
            await self._wait()
        found = b"".join(self._chunks)
        self._chunks, self._num_unread = [], 0
        if self._transport is not None and not self._is_lost:
            self._transport.resume_reading()
        return found

    async def whole(self) -> bytes:
        """Return the rest of the answer. BrokenError if the connection is lost before its end."""
        parts = []
        while part := await self.chunk():
            parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        """Close the connection at once; the other side notices."""
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        if self._is_lost:
            raise BrokenError("the connection was lost")
        self._changed.clear()
        await self._changed.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has another base class
        self._is_complete = True

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, AttributeError):  # no answer was expected
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self._is_lost = True
        self._changed.set()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._has_head = True
        self._changed.set()

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._chunks.append(body)
        self._num_unread += len(body)
        if self._num_unread > MAX_UNREAD_BYTES and self._transport is not None:
            self._transport.pause_reading()
        self._changed.set()

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._is_complete = True
        self._changed.set()


async def connect(host: str, port: int) -> Connection:
    """Return a new connection. OSError if the server does not listen."""
    _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port)
    return connection
