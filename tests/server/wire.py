"""HTTP over plain sockets: the test decides when its client leaves, and sees each byte."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit


@dataclasses.dataclass(slots=True)
class Answer:
    """What arrived of an answer. `status` is None when the connection closed before it."""

    status: int | None = None
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    body: bytes = b""
    is_whole: bool = False
    """Whether the answer arrived to its end."""

    @property
    def events(self) -> list[str]:
        """The data of each whole server-sent event."""
        blocks = self.body.split(b"\n\n")[:-1]
        return [block.removeprefix(b"data: ").decode() for block in blocks]

    @property
    def records(self) -> list[dict[str, Any]]:
        """The events that are JSON."""
        return [json.loads(event) for event in self.events if event != "[DONE]"]


class Connection:
    """One connection to a server. Use `connected`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> None:
        """Send a request: POST with a body, else GET."""
        data = b"" if body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        fields = {"host": "server", "content-length": str(len(data)), **(headers or {})}
        if body is not None:
            fields.setdefault("content-type", "application/json")
        lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items()), "", ""]
        self.writer.write("\r\n".join(lines).encode() + data)

    async def parts(self, answer: Answer) -> AsyncIterator[bytes]:
        """Read one answer into `answer`, and give each part of its body as it arrives."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").rstrip().split("\r\n")
            answer.status = int(first.split()[1])
            answer.headers = {
                name.lower(): value.strip()
                for name, _, value in (line.partition(":") for line in lines)
            }
            if "content-length" in answer.headers:
                answer.body = await self.reader.readexactly(int(answer.headers["content-length"]))
                yield answer.body
            else:
                while size := int(await self.reader.readline() or b"x", 16):
                    part = (await self.reader.readexactly(size + 2))[:-2]
                    answer.body += part
                    yield part
                await self.reader.readline()
            answer.is_whole = True
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            return  # the connection closed

    async def answer(self) -> Answer:
        """Read one answer."""
        found = Answer()
        async for _ in self.parts(found):
            pass
        return found


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[Connection]:
    """A connection, which the block may end sooner by `writer.close` or `transport.abort`."""
    address = urlsplit(url)
    assert address.hostname is not None
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def ask(url: str, path: str, body: Any = None, **headers: str) -> Answer:
    """The answer to one request on a connection of its own."""
    async with connected(url) as connection:
        connection.send(path, body, headers)
        return await connection.answer()
