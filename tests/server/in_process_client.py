"""Asker: sends requests to an application in this process, and reads its answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

    from enginebay import LLM
    from enginebay.serving.loop import EngineLoop

HELLO = [{"role": "user", "content": "Hello!"}]


class Asker:
    """A client of an application of its own, over an LLM that others share."""

    def __init__(self, llm: LLM, parsers: Mapping[str, str] | None = None, **settings: Any) -> None:
        from enginebay_server.app import create_app
        from enginebay_server.served import ServedModel
        from enginebay_server.settings import ServerSettings

        self.llm = llm
        self.model = ServedModel("demo", llm, **(parsers or {}))
        self.model.warmup = "lazy"
        self.app = create_app([self.model], ServerSettings(**settings))
        self.state = self.app.state.server

    def all(self, *requests: tuple[str, str, dict[str, Any]]) -> Sequence[httpx.Response]:
        """The answers of requests (method, path, arguments of httpx) that are sent together."""
        import httpx

        async def send() -> list[httpx.Response]:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return list(
                    await asyncio.gather(*(client.request(m, p, **a) for m, p, a in requests))
                )

        return asyncio.run(send())

    def get(self, path: str, **arguments: Any) -> httpx.Response:
        return self.all(("GET", path, arguments))[0]

    def post(self, path: str, json: Any = None, **arguments: Any) -> httpx.Response:
        if json is not None:
            arguments["json"] = json
        return self.all(("POST", path, arguments))[0]

    def ok(self, path: str, **body: Any) -> dict[str, Any]:
        """The body of an answer of success."""
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def refused(self, path: str, status: int, **body: Any) -> dict[str, Any]:
        """The error of an answer with a status."""
        return error_of(self.post(path, body), status)

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a whole stream, which ends as it should."""
        answer = self.post(path, {"stream": True, **body})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, last = events_of(answer.text)
        assert last == "[DONE]"
        return [json.loads(event) for event in events]


def events_of(text: str) -> list[str]:
    """The data of each event of a stream."""
    blocks = text.split("\n\n")
    assert blocks.pop() == "", "an event is not complete"
    assert all(block.startswith("data: ") for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer, in OpenAI's form."""
    assert answer.status_code == status, answer.text
    [(key, error)] = answer.json().items()
    assert key == "error"
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    found: dict[str, Any] = error
    return found


def text_of(events: Sequence[dict[str, Any]], index: int = 0) -> str:
    """The text of a choice of a stream."""
    choices = [c for event in events for c in event["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


def reasons_of(events: Sequence[dict[str, Any]], index: int = 0) -> list[str]:
    """The finish reasons of a choice of a stream, of which there is one."""
    choices = [c for event in events for c in event["choices"] if c["index"] == index]
    return [c["finish_reason"] for c in choices if c["finish_reason"] is not None]


def set_paused(loop: EngineLoop, *, paused: bool) -> None:
    """Let a loop take in requests and run none, or go on."""

    def change() -> None:
        loop.is_paused = paused

    loop.call(change)
