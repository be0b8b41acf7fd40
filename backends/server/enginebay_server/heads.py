"""Limits on the head of a request, which is its first line and its headers, and the refusal of a
head that is not HTTP.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from enginebay_server.errors import ApiError, error_body

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0
TOO_LARGE = f"The head of the request has more than {MAX_HEAD_BYTES} bytes."


class HeadError(Exception):
    """A head that is too large."""


class LimitedHeads(HttpToolsProtocol):
    """A connection that is closed when a head is too large, or takes too long.

    A head may have MAX_HEAD_BYTES: its target, names and values, and what has arrived of it. From
    the first byte of a connection, or of a later request on it, the whole head must arrive in
    HEAD_TIMEOUT_S seconds.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = True
        self._has_ended_message = False
        self._num_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        """Bytes of the target, the names and the values of a head, as far as they are parsed."""
        self._why: str | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin the time of the first head."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass the data on, and count it while a head is not complete."""
        if self._is_in_head and self._timer is None:
            self._start_timer()
        self._has_ended_message = False
        super().data_received(data)
        if not self._is_in_head or self._has_ended_message or self.transport.is_closing():
            return  # how much of this packet belongs to the next head is not known
        self._num_bytes += len(data)
        if self._num_bytes > MAX_HEAD_BYTES:
            self._refuse(TOO_LARGE)

    def on_url(self, url: bytes) -> None:
        """Count the target."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a name and a value."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def _count(self, num_bytes: int) -> None:
        """Raise HeadError, which the parser reports to uvicorn, for a head that is too large: it
        may have come in one packet with its end.
        """
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            self._why = TOO_LARGE
            raise HeadError(TOO_LARGE)

    def on_headers_complete(self) -> None:
        """End the head."""
        self._is_in_head, self._num_bytes, self._head_bytes = False, 0, 0
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Expect the next head."""
        self._is_in_head = self._has_ended_message = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse the request, in the format of OpenAI's API, and close the connection. uvicorn
        calls this for a request that it cannot parse.
        """
        body = error_body("", ApiError(400, self._why or msg))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[400] + head % len(body) + body)
        self.transport.close()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(
            HEAD_TIMEOUT_S,
            self._refuse,
            f"The head of the request took more than {HEAD_TIMEOUT_S:g} s.",
        )

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, why: str) -> None:
        self._stop_timer()
        if not self.transport.is_closing():
            self.send_400_response(why)
