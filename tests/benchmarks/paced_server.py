"""An OpenAI-compatible server without a model: each token leaves at a time that is known before.

    python -m tests.benchmarks.paced_server --port 8100 --ttft-ms 100 --token-ms 20

Request k of a run gets its first token `ttft + spread * (k % 10) / 9` seconds after its last byte
has arrived, and every further chunk `token` seconds after the one before it. Times are absolute, so
a late chunk delays no other. It speaks HTTP/1.1 with the standard library alone and takes little
CPU. A prompt that holds @refuse is answered with 500; one that holds @cut loses its connection
after two chunks; one that holds @quiet gets no text.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
from collections.abc import Iterator
from typing import Any

STEPS = 10
END = b"0\r\n\r\n"


@dataclasses.dataclass
class Pace:
    """Seconds to the first token, between chunks, and how far the first varies; tokens of a
    chunk.
    """

    ttft_s: float = 0.1
    token_s: float = 0.02
    spread_s: float = 0.0
    tokens_per_chunk: int = 1
    has_usage: bool = True
    numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def first_s(self) -> float:
        """Seconds to the first token of the next request."""
        return self.ttft_s + self.spread_s * (next(self.numbers) % STEPS) / (STEPS - 1)


class Connection(asyncio.Protocol):
    """One client's connection, which answers one request at a time."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._data = b""
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, rest = self._data.partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.split(b"\r\n")
        sizes = [line[15:] for line in lines if line[:15].lower() == b"content-length:"]
        size = int(sizes[0]) if sizes else 0
        if len(rest) >= size:
            self._data = rest[size:]
            self._answer(lines[0].split()[1].decode(), rest[:size])

    def _answer(self, path: str, body: bytes) -> None:
        if path == "/v1/models":
            self._object(200, {"object": "list", "data": [{"id": "paced", "object": "model"}]})
        elif path == "/version":
            self._object(200, {"version": "paced"})
        elif path in ("/v1/chat/completions", "/v1/completions"):
            if b"@refuse" in body:
                self._object(500, {"error": {"message": "refused, as asked"}})
            else:
                Stream(self._transport, self._pace, json.loads(body), "chat" in path).begin()
        else:
            self._object(404, {"error": {"message": f"no {path} here"}})

    def _object(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
        self._transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)


class Stream:
    """The chunks of one answer."""

    def __init__(self, transport: Any, pace: Pace, request: dict[str, Any], is_chat: bool) -> None:
        self._transport, self._pace, self._is_chat = transport, pace, is_chat
        limit = request.get("max_completion_tokens") or request.get("max_tokens") or 16
        text = json.dumps(request.get("messages") or request.get("prompt"))
        self._num_tokens = 0 if "@quiet" in text else limit
        self._num_prompt_tokens = len(text.split())
        self._is_cut = "@cut" in text
        self._sent = 0
        self._loop = asyncio.get_running_loop()
        self._due_s = self._loop.time() + pace.first_s()

    def begin(self) -> None:
        """Send the head, the role, and each chunk at its time."""
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        self._transport.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
        if self._is_chat:
            self._write(self._event({"role": "assistant", "content": ""}, None))
        self._loop.call_at(self._due_s, self._next)

    def _next(self) -> None:
        if self._transport.is_closing():
            return
        if self._is_cut and self._sent >= 2:
            self._transport.close()
            return
        size = min(self._pace.tokens_per_chunk, self._num_tokens - self._sent)
        if size > 0:
            self._write(self._event({"content": " word" * size}, None))
            self._sent += size
        if self._sent >= self._num_tokens:
            self._finish()
            return
        self._due_s += self._pace.token_s
        self._loop.call_at(self._due_s, self._next)

    def _finish(self) -> None:
        events = [self._event({}, "length")]
        if self._pace.has_usage:
            counts = {
                "prompt_tokens": self._num_prompt_tokens,
                "completion_tokens": self._num_tokens,
                "total_tokens": self._num_prompt_tokens + self._num_tokens,
            }
            events.append({"object": self._object, "choices": [], "usage": counts})
        for event in events:
            self._write(event)
        self._frame(b"data: [DONE]\n\n")
        self._transport.write(END)

    @property
    def _object(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _event(self, delta: dict[str, str], finish_reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
        choice |= {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        return {"id": "c-1", "object": self._object, "model": "paced", "choices": [choice]}

    def _write(self, event: dict[str, Any]) -> None:
        self._frame(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _frame(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%s\r\n" % (len(data), data))


async def serve(pace: Pace, port: int) -> asyncio.Server:
    """A server that listens on 127.0.0.1; port 0 takes a free one."""
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: Connection(pace), "127.0.0.1", port, backlog=1024)


async def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--ttft-ms", type=float, default=100.0)
    parser.add_argument("--token-ms", type=float, default=20.0)
    parser.add_argument("--spread-ms", type=float, default=0.0)
    parser.add_argument("--tokens-per-chunk", type=int, default=1)
    args = parser.parse_args()
    times = (one / 1e3 for one in (args.ttft_ms, args.token_ms, args.spread_ms))
    server = await serve(Pace(*times, tokens_per_chunk=args.tokens_per_chunk), args.port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
