"""A client that costs little: it sends prepared requests and looks for the end of their streams.

`python -m tests.benchmarks.http_client PORT` reads commands as lines of JSON, and answers each with
the seconds that it took: {"first": [prompts], "max_tokens": N} sends the prompts one after the
other and measures until the first token of each; {"load": [prompts], "max_tokens": N, "streams": S}
sends them with at most S at a time.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import cast

import uvloop

DONE = b"data: [DONE]"
TEXT = b'"text":"'


class Connection(asyncio.Protocol):
    """A connection that is kept alive, with one request at a time."""

    def __init__(self) -> None:
        self._end: asyncio.Future[None] | None = None
        self._tail, self._first_s = b"", 0.0

    async def open(self, port: int) -> Connection:
        """Connect to a port of this machine."""
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self, "127.0.0.1", port)
        return self

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    @property
    def is_closed(self) -> bool:
        """Whether the server has closed the connection, which it does after some idle seconds."""
        return self._transport.is_closing()

    def data_received(self, data: bytes) -> None:
        if self._first_s == 0.0 and TEXT in data:
            self._first_s = time.perf_counter()
        self._tail = self._tail[-32:] + data
        assert self._end is not None, "a request was sent"
        if DONE in self._tail and self._tail.endswith(b"0\r\n\r\n"):
            self._end.set_result(None)
        elif data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            self._end.set_exception(RuntimeError(data.decode(errors="replace")))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_exception(exc or RuntimeError("the server closed the connection"))

    async def complete(self, request: bytes) -> float:
        """Send a request, wait for the end of its stream, and return the seconds to the first
        token.
        """
        self._tail, self._first_s = b"", 0.0
        self._end = asyncio.get_running_loop().create_future()
        start_s = time.perf_counter()
        self._transport.write(request)
        await self._end
        return self._first_s - start_s


def request_of(prompt: str, max_tokens: int) -> bytes:
    """The bytes of a streamed completion of exactly max_tokens tokens."""
    fields = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens}
    body = json.dumps({**fields, "ignore_eos": True, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


class Client:
    """Connections to one server."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connections: list[Connection] = []

    async def first(self, requests: Sequence[bytes]) -> list[float]:
        """The seconds to the first token of each request, one after the other."""
        [connection] = await self._open(1)
        return [await connection.complete(request) for request in requests]

    async def load(self, requests: Sequence[bytes], num_streams: int) -> list[float]:
        """The seconds until all requests are answered."""
        connections, left = await self._open(num_streams), iter(requests)

        async def work(connection: Connection) -> None:
            for request in left:
                await connection.complete(request)

        start_s = time.perf_counter()
        await asyncio.gather(*map(work, connections))
        return [time.perf_counter() - start_s]

    async def _open(self, num: int) -> list[Connection]:
        self._connections = [one for one in self._connections if not one.is_closed]
        while len(self._connections) < num:
            self._connections.append(await Connection().open(self._port))
        return self._connections[:num]


async def main(port: int) -> None:
    """Answer commands until the input ends."""
    client = Client(port)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        prompts = command.get("first") or command["load"]
        requests = [request_of(prompt, command["max_tokens"]) for prompt in prompts]
        took_s = (
            await client.first(requests)
            if "first" in command
            else await client.load(requests, command["streams"])
        )
        print(json.dumps(took_s), flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(int(sys.argv[1])))
