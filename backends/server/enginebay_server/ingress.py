"""The middleware that every HTTP request passes: API keys, size limits, draining, request ids and
the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import urllib.parse
import uuid
from collections.abc import Awaitable, Callable, Container, Mapping, MutableMapping
from typing import Any, Protocol

from enginebay_server.errors import ApiError, api_error, error_body
from enginebay_server.keys import is_known
from enginebay_server.request_span import SPAN_KEY, RequestSpan, request_span
from enginebay_server.settings import ServerSettings

log = logging.getLogger("enginebay.server")

AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

PROBES = frozenset({"/health", "/liveness", "/readiness"})
"""Paths that need no key, and are answered while the server drains."""

PAGE = "/ui"
"""The page. Its files need no key; its data does."""

REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


LINGER_S = 5.0

MAX_BUFFERED_BODIES = 64
"""The bodies of all open requests together may have this many times the bytes of the largest."""


class IngressState(Protocol):
    """The state that Door reads and writes."""

    is_draining: bool
    num_open: int
    body_bytes: int

    @property
    def settings(self) -> ServerSettings:
        """Keys and limits."""


class IngressMiddleware:
    """Pure ASGI middleware.

    It reads the whole body, so that routes wait only for the engine, or for the client to leave.
    """

    def __init__(self, app: App, state: IngressState, takes_json: Container[str]) -> None:
        """`takes_json` has the paths that take a POST, whose body must be JSON."""
        self._app = app
        self._state = state
        self._takes_json = takes_json

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        named = headers.get(b"x-request-id", b"")
        request_id = named if REQUEST_ID.fullmatch(named) else uuid.uuid4().hex.encode()
        began_s, status = time.monotonic(), 0

        async def send_named(message: AsgiMessage) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        if SPAN_KEY not in scope and log.isEnabledFor(logging.INFO):
            scope[SPAN_KEY] = RequestSpan(scope["method"], scope["path"])
        held = CountedBytes(self._state)
        is_probe = scope["path"] in PROBES
        if not is_probe:
            self._state.num_open += 1
        try:
            self._check(scope["path"], headers)
            body = await self._body(scope, headers, receive, held)
            await self._app(scope, replaying(body, receive), send_named)
        except ApiError as error:
            await refuse(send_named, error, scope["path"], receive)
        except Exception as error:
            log.exception("request %s failed", request_id.decode())
            if status:  # the answer has begun, so the connection must break
                raise
            await refuse(send_named, api_error(error), scope["path"], receive)
        except asyncio.CancelledError:
            if not self._state.is_draining:
                raise
            # The server ends, and this request waits for a thread that hangs.
            log.warning("request %s ends without its outcome", request_id.decode())
            if not status:
                ended = ApiError(503, "the server ended the request", code="request_aborted")
                await refuse(send_named, ended, scope["path"], receive)
        finally:
            held.free()
            if not is_probe:
                self._state.num_open -= 1
            log.info(
                "id=%(id)s method=%(method)s path=%(path)s status=%(status)s "
                "seconds=%(seconds).4f%(tokens)s",
                {
                    "id": request_id.decode(),
                    "method": scope["method"],
                    "path": urllib.parse.quote(scope["path"], errors="replace"),
                    "status": status,
                    "seconds": time.monotonic() - began_s,
                    "tokens": token_counts(scope),
                },
            )

    def _check(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise ApiError for a request without a valid key, or while the server drains."""
        if path in PROBES or is_page(path):
            return
        settings = self._state.settings
        keys = settings.accepted_keys
        if keys and not is_known(given_key(headers), keys):
            raise ApiError(
                401,
                "a missing or unknown API key. Allowed: the header "
                '"Authorization: Bearer KEY". Pass a key of this server.',
                code="invalid_api_key",
            )
        if self._state.is_draining:
            raise ApiError(
                503,
                "the server is ending and takes no requests",
                code="server_draining",
                retry_after_s=settings.retry_after_s,
            )

    async def _body(
        self,
        scope: Mapping[str, Any],
        headers: Mapping[bytes, bytes],
        receive: Receive,
        held: CountedBytes,
    ) -> bytes:
        """Read the body, whose bytes `held` counts.

        Raises ApiError 413 for a body that is too large, 408 for one that is too slow, 499 when the
        client leaves before its end, 429 while the bodies of all requests are too large together,
        and 415 for a content type other than JSON, or a compressed body.
        """
        settings = self._state.settings
        too_large = ApiError(
            413,
            f"a body of more than {settings.max_body_bytes} bytes. Send less, or raise "
            "--max-body-bytes.",
            code="request_too_large",
        )
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > settings.max_body_bytes:
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(settings.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(499, "the client left before its body was complete")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > settings.max_body_bytes:
                        raise too_large
                    held.add(len(parts[-1]))
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            raise ApiError(
                408, f"a body that took more than {settings.body_timeout_s:g} s"
            ) from None
        if scope["method"] == "POST" and scope["path"] in self._takes_json:
            check_content_type(headers.get(b"content-type", b""))
            check_encoding(headers.get(b"content-encoding", b""))
        return b"".join(parts)


def token_counts(scope: MutableMapping[str, Any]) -> str:
    """Return the part of a log line about the model of a request and its tokens; "" for a request
    for which no model ran.
    """
    span = request_span(scope)
    if span is None or span.model is None:
        return ""
    model = urllib.parse.quote(span.model, safe="/:@")
    return f" model={model} prompt_tokens={span.num_prompt} completion_tokens={span.num_new}"


class CountedBytes:
    """The bytes of one body that are counted in the state of a IngressMiddleware."""

    def __init__(self, state: IngressState) -> None:
        self._state = state
        self._num = 0

    def add(self, num_bytes: int) -> None:
        """Count bytes. ApiError 429 when all bodies have too many."""
        self._num += num_bytes
        self._state.body_bytes += num_bytes
        settings = self._state.settings
        if self._state.body_bytes > MAX_BUFFERED_BODIES * settings.max_body_bytes:
            raise ApiError(
                429,
                "the bodies of all requests together are as large as the server takes. Send the "
                "request again later.",
                code="rate_limit_exceeded",
                retry_after_s=settings.retry_after_s,
            )

    def free(self) -> None:
        """Count the bytes no longer."""
        self._state.body_bytes -= self._num
        self._num = 0


def is_page(path: str) -> bool:
    """Return whether a path is a file of the page."""
    return path == PAGE or (path.startswith(f"{PAGE}/") and path != f"{PAGE}/data")


def check_content_type(given: bytes) -> None:
    """Raise ApiError 415 unless the content type is JSON."""
    kind = given.partition(b";")[0].strip().lower()
    if kind != b"application/json" and not kind.endswith(b"+json"):
        shown = given[:100].decode("latin-1") or "none"
        raise ApiError(
            415,
            f"content type {shown}. Allowed: application/json. Pass the header "
            '"Content-Type: application/json".',
            code="unsupported_media_type",
        )


def check_encoding(given: bytes) -> None:
    """Raise ApiError 415 for a compressed body."""
    if given.strip().lower() not in (b"", b"identity"):
        raise ApiError(
            415,
            f"content encoding {given[:100].decode('latin-1')}. Allowed: none. Send the body "
            "without compression, and without the header Content-Encoding.",
            code="unsupported_media_type",
        )


def given_key(headers: Mapping[bytes, bytes]) -> str:
    """Return the key of a request, from a bearer token or x-api-key; "" without one."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    found = key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
    return found.decode("latin-1")


def replaying(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first returns the body that was read, then later messages."""
    is_given = False

    async def again() -> AsgiMessage:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def refuse(send: Send, error: ApiError, path: str, receive: Receive) -> None:
    """Send an error as the whole answer. The rest of a body that is too large is dropped for
    LINGER_S at most: a client that is still sending when the connection closes loses the answer.
    """
    body = error_body(path, error)
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **error.headers,
    }
    if error.status in (408, 413, 429):
        headers["connection"] = "close"  # the rest of the body is not read
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    if error.status == 413:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (await receive()).get("more_body"):
                    pass
    await send({"type": "http.response.body", "body": b""})
