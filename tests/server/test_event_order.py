"""The events of streams of responses and messages come in the order of their specifications, also
when an answer is cut off, fails or is cancelled.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from enginebay.outputs import StreamChunk
from enginebay_server import chat, routes_anthropic, routes_responses
from enginebay_server.anthropic import MessageStream
from enginebay_server.errors import ApiError
from enginebay_server.response_stream import ResponseStream
from tests.server.in_process_client import HELLO, Asker
from tests.server.test_tools import CALL, PARSERS

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
FREE = {"type": "custom", "name": "now"}
NOW = {"type": "function", "name": "now", "parameters": {"type": "object"}}


def events_of(asker: Asker, path: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each under its name, and in numbered order if they have numbers."""
    given = {"input": "Hello!"} if path == RESPONSES else {"messages": HELLO}
    answer = asker.post(path, {**given, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    events = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    if path == RESPONSES:
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def kinds_of(events: list[dict[str, Any]]) -> list[str]:
    """The types of events, of which equal ones in a row count once."""
    kinds = [event["type"].removeprefix("response.") for event in events]
    return [kind for place, kind in enumerate(kinds) if kinds[place - 1 : place] != [kind]]


@pytest.fixture
def parsing(asker: Asker, monkeypatch: pytest.MonkeyPatch) -> Asker:
    """A server whose model reasons, writes and calls."""
    original = chat.chat_params

    def guided(*args: Any) -> Any:
        text = re.escape(f"<think>So.</think>I look.{CALL}")
        return original(*args).model_copy(update={"regex": text})

    for routes in (routes_responses, routes_anthropic):
        monkeypatch.setattr(routes, "chat_params", guided)
    return Asker(asker.llm, PARSERS)


PARTS = ["output_item.added", "content_part.added"]
ENDS = ["content_part.done", "output_item.done"]


@pytest.mark.parametrize(
    ("tool", "name", "item"),
    [
        (NOW, "function_call_arguments", "function_call"),
        (FREE, "custom_tool_call_input", "custom_tool_call"),
    ],
)
def test_events_of_a_response_with_all_kinds_of_items(
    parsing: Asker, tool: dict[str, Any], name: str, item: str
) -> None:
    events = events_of(parsing, RESPONSES, tools=[tool], max_output_tokens=200)
    assert kinds_of(events) == [
        "created", "in_progress",
        *PARTS, "reasoning_text.delta", "reasoning_text.done", *ENDS,
        *PARTS, "output_text.delta", "output_text.done", *ENDS,
        "output_item.added", f"{name}.delta", f"{name}.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    found = events[-1]["response"]["output"]
    assert [one["type"] for one in found] == ["reasoning", "message", item]
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == found[event["output_index"]]["id"]


def test_events_of_a_message_with_all_kinds_of_blocks(parsing: Asker) -> None:
    tool = {"name": "now", "input_schema": {"type": "object"}}
    events = events_of(parsing, MESSAGES, tools=[tool], max_tokens=200)
    deltas = [e["delta"]["type"] for e in events if e["type"] == "content_block_delta"]
    order = list(dict.fromkeys(deltas))
    assert order == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kinds_of(events) == ["message_start", *block * 3, "message_delta", "message_stop"]
    ends = [place for place, event in enumerate(events) if event["type"] == "content_block_stop"]
    assert events[ends[0] - 1]["delta"] == {"type": "signature_delta", "signature": ""}


def test_an_answer_that_is_cut_off_ends_its_item_and_is_incomplete(asker: Asker) -> None:
    events = events_of(asker, RESPONSES, max_output_tokens=3)
    assert kinds_of(events)[-2:] == ["output_item.done", "incomplete"]
    assert events[-2]["item"]["status"] == "incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def break_down(monkeypatch: pytest.MonkeyPatch, stream: type[Any], error: Exception) -> None:
    """Let a stream fail at its second chunk, or at its end if there is none."""
    write, chunks = stream.write, []

    def failing(self: Any, place: int, chunk: StreamChunk) -> bytes:
        chunks.append(chunk)
        if len(chunks) > 1:
            raise error
        written: bytes = write(self, place, chunk)
        return written

    async def ends(self: Any) -> bytes:
        raise error

    monkeypatch.setattr(stream, "write", failing)
    monkeypatch.setattr(stream, "end", ends)


def test_a_response_that_fails_says_so_last(asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = ApiError(503, "the engine has stopped", code="engine_stopped")
    break_down(monkeypatch, ResponseStream, gone)
    events = events_of(asker, RESPONSES, max_output_tokens=8)
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    error, failed = events[-2], events[-1]["response"]
    assert (error["code"], error["message"]) == ("engine_stopped", "the engine has stopped")
    assert failed["status"] == "failed"
    assert failed["error"] == {"code": "engine_stopped", "message": "the engine has stopped"}
    assert [item["status"] for item in failed["output"]] == ["incomplete"]
    assert failed["id"] == events[0]["response"]["id"]
    assert asker.get(f"{RESPONSES}/{failed['id']}").status_code == 404


def test_a_message_that_fails_says_so_last(asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    break_down(monkeypatch, MessageStream, ApiError(503, "the engine has stopped"))
    events = events_of(asker, MESSAGES, max_tokens=8)
    assert events[-1] == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "the engine has stopped"},
    }


def test_a_response_that_is_cancelled_fails(asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    write = ResponseStream.write

    def cancelling(self: ResponseStream, place: int, chunk: StreamChunk) -> bytes:
        asker.llm.abort(chunk.request_id)
        return write(self, place, chunk)

    monkeypatch.setattr(ResponseStream, "write", cancelling)
    events = events_of(asker, RESPONSES, max_output_tokens=200)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "request_aborted"


def test_a_response_is_cancelled_when_its_client_leaves(asker: Asker) -> None:
    async def leave() -> None:
        body = json.dumps({"input": "Hello!", "stream": True, "max_output_tokens": 200}).encode()
        sent = asyncio.Event()
        given = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if given:
                return given.pop()
            await sent.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message.get("body"):
                sent.set()

        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http", "method": "POST", "path": RESPONSES, "headers": headers,
            "query_string": b"", "http_version": "1.1", "scheme": "http",
        }  # fmt: skip
        async with asyncio.timeout(60):
            await asker.app(scope, receive, send)
            while asker.llm.counts().running:
                await asyncio.sleep(0.01)

    asyncio.run(leave())
