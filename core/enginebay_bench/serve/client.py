"""The HTTP client (extra `bench`: httpx), which spends little time per chunk."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any

import httpx

from enginebay.contracts.text import Tokenizer
from enginebay.errors import InputError, error_line, shown_text
from enginebay_bench.serve.sse import AnswerReader, error_text
from enginebay_bench.serve.target import ServerTarget
from enginebay_bench.serve.timeline import RequestTimeline

PROBE_TIMEOUT_S = 10.0
MAX_ERROR_BYTES = 4096


class Client:
    """Sends requests and reads their answers.

    Each request in flight has a connection, which a later request uses again. Connections are not
    in one pool: httpx searches its pool from the start for every request.
    """

    def __init__(
        self, target: ServerTarget, timeout_s: float, tokenizer: Tokenizer | None = None
    ) -> None:
        self._target, self._timeout_s, self._tokenizer = target, timeout_s, tokenizer
        is_tls = target.url.startswith("https:")
        # One for all transports: each would make its own, which takes milliseconds.
        self._ssl = (
            ssl.create_default_context() if is_tls else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        )
        self._free: list[httpx.AsyncHTTPTransport] = []
        self._headers = httpx.Headers(target.headers)
        self._url = httpx.URL(target.url)

    async def send(self, body: bytes, timeline: RequestTimeline) -> None:
        """Send one request and fill its timeline until the answer ends.

        A failure is the timeline's `error`: a status that is not 200, an error event, a broken
        connection, an answer that is cut short, or no end after `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        timeline.sent_s = loop.time()
        try:
            async with asyncio.timeout(self._timeout_s), self._connection() as transport:
                await self._exchange(transport, body, timeline)
        except TimeoutError:
            timeline.error = f"no end within {self._timeout_s:g} s"
        except (httpx.HTTPError, OSError, ssl.SSLError) as error:
            timeline.error = error_line(error)
        timeline.ended_s = loop.time()
        if timeline.error is None and timeline.token_source == "chunks" and self._tokenizer:
            ids = self._tokenizer.encode("".join(timeline.text), add_special_tokens=False)
            timeline.num_tokens, timeline.token_source = len(ids), "tokenizer"
        timeline.text.clear()

    async def _exchange(
        self, transport: httpx.AsyncHTTPTransport, body: bytes, timeline: RequestTimeline
    ) -> None:
        time = asyncio.get_running_loop().time
        request = httpx.Request("POST", self._url, headers=self._headers, content=body)
        response = await transport.handle_async_request(request)
        stream = response.stream
        assert isinstance(stream, httpx.AsyncByteStream)
        try:
            kind = response.headers.get("content-type", "")
            if response.status_code != 200 or not kind.startswith("text/event-stream"):
                timeline.error = await _refusal(response, stream)
                return
            reader = AnswerReader(timeline, keep_text=self._tokenizer is not None)
            async for data in stream:
                reader.feed(data, time())
            reader.end()
        finally:
            await stream.aclose()

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[httpx.AsyncHTTPTransport]:
        """A transport that no other request uses; one that failed is closed."""
        transport = self._free.pop() if self._free else self._new()
        try:
            yield transport
        except BaseException:
            await transport.aclose()
            raise
        self._free.append(transport)

    def _new(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1)
        return httpx.AsyncHTTPTransport(verify=self._ssl, limits=limits)

    async def aclose(self) -> None:
        """Close all connections."""
        while self._free:
            await self._free.pop().aclose()


async def _refusal(response: httpx.Response, stream: httpx.AsyncByteStream) -> str:
    """Why an answer is no stream of events."""
    found = b""
    async for data in stream:
        found += data
        if len(found) > MAX_ERROR_BYTES:
            break
    try:
        text = error_text(json.loads(found))
    except (ValueError, RecursionError):
        text = shown_text(found[:MAX_ERROR_BYTES].decode(errors="replace"), 160)
    if response.status_code != 200:
        return f"HTTP {response.status_code}: {text}".removesuffix(": ")
    return f"an answer that is no event stream: {text}"


def probe_server(address: str, headers: dict[str, str]) -> dict[str, Any]:
    """What the server says of itself: `models` (ids of /v1/models, [] where it has none) and
    `version` (the body of /version, None where it has none).

    InputError when no server answers at `address`, or when it refuses the key.
    """
    with httpx.Client(headers=headers, timeout=PROBE_TIMEOUT_S, trust_env=False) as client:
        try:
            answer = client.get(f"{address}/v1/models")
            if answer.status_code in (401, 403):
                raise InputError(
                    f"{address} answers {answer.status_code} to /v1/models",
                    "a key that the server accepts",
                    "Put the key into the environment variable that --api-key-env names.",
                )
            models = _json(answer).get("data")
            version = _json(client.get(f"{address}/version"))
        except (httpx.HTTPError, OSError) as error:
            raise InputError(
                f"--url {address}: {error_line(error)}",
                "the address of a running server",
                "Start one with `enginebay serve demo`, or pass another --url.",
            ) from None
    ids = [one.get("id") for one in models or () if isinstance(one, dict)]
    return {"models": [id_ for id_ in ids if isinstance(id_, str)], "version": version or None}


def _json(answer: httpx.Response) -> dict[str, Any]:
    """The object of an answer; {} when it is no success or no object."""
    try:
        value = answer.json() if answer.status_code == 200 else {}
    except (ValueError, RecursionError):
        value = {}
    return value if isinstance(value, dict) else {}
