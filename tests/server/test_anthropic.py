"""/v1/messages: Anthropic's form of what the chat endpoint answers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from enginebay_server.anthropic import CountBody
from enginebay_server.messages_in import as_messages
from tests.server.in_process_client import HELLO, Asker
from tests.server.test_tools import CALL, PARSERS

PATH = "/v1/messages"
NOW = {"name": "now", "description": "The time.", "input_schema": {"type": "object"}}


def events_of(asker: Asker, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each under its name."""
    answer = asker.post(PATH, {"messages": HELLO, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    events = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's events are together; blocks are opened and closed in order."""
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    message = dict(events[0]["message"])
    parts: list[str] = []
    is_open = False
    for event in events[1:-1]:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(message["content"])
                is_open, parts = True, []
                message["content"].append(event["content_block"])
            case "content_block_delta":
                delta = event["delta"]
                parts.append(
                    delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
                )
            case "content_block_stop":
                is_open, block = False, message["content"][event["index"]]
                field = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]
                text = "".join(parts)
                block[field] = json.loads(text) if field == "input" else text
            case "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
    return message


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Two messages are the same but for their ids."""
    for message in (one, other):
        message.pop("id")
        message.pop("usage")
        for block in message["content"]:
            assert block.pop("id", "x")
    assert one == other


def test_a_message_is_what_the_chat_answers(asker: Asker) -> None:
    chat = asker.ok("/v1/chat/completions", messages=HELLO, max_tokens=8)
    message = asker.ok(PATH, model="demo", messages=HELLO, max_tokens=8)
    text = chat["choices"][0]["message"]["content"]
    assert message["content"] == [{"type": "text", "text": text}]
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    usage = message["usage"]
    assert usage["output_tokens"] == 8
    num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert num_prompt == chat["usage"]["prompt_tokens"]
    same(message, joined(events_of(asker, max_tokens=8)))


def test_a_stop_sequence_is_named(asker: Asker) -> None:
    message = asker.ok(PATH, messages=HELLO, max_tokens=30, stop_sequences=["!"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "!")
    same(message, joined(events_of(asker, max_tokens=30, stop_sequences=["!"])))


def test_reasoning_and_calls_are_blocks(asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    parsing = Asker(asker.llm, PARSERS)
    from enginebay_server import routes_anthropic

    chat_params = routes_anthropic.chat_params

    def guided(*args: Any) -> Any:
        text = re.escape(f"<think>So.</think>I look.{CALL}")
        return chat_params(*args).model_copy(update={"regex": text})

    monkeypatch.setattr(routes_anthropic, "chat_params", guided)
    body: dict[str, Any] = {"max_tokens": 200, "tools": [NOW]}
    message = parsing.ok(PATH, messages=HELLO, **body)
    kinds = [block["type"] for block in message["content"]]
    assert kinds == ["thinking", "text", "tool_use"]
    assert message["content"][2]["input"] == {}
    assert message["stop_reason"] == "tool_use"
    same(message, joined(events_of(parsing, **body)))


def test_a_call_that_is_demanded_is_made(asker: Asker) -> None:
    choice = {"type": "tool", "name": "now"}
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    body = {"tools": [{**NOW, "input_schema": schema}], "tool_choice": choice, "max_tokens": 50}
    message = asker.ok(PATH, messages=HELLO, **body)
    [block] = message["content"]
    assert (block["name"], block["input"], message["stop_reason"]) == ("now", {}, "tool_use")
    same(message, joined(events_of(asker, **body)))


def test_tools_and_results_reach_the_chat_template(asker: Asker) -> None:
    from enginebay_server.anthropic import MessagesBody
    from enginebay_server.messages_in import as_messages

    use = {"type": "tool_use", "id": "1", "name": "now", "input": {"zone": "UTC"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "1",
        "content": [{"type": "text", "text": "noon"}],
    }
    body = MessagesBody(
        max_tokens=1,
        system=[{"type": "text", "text": "Be brief."}],
        messages=[
            *HELLO,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "So."}, use]},
            {"role": "user", "content": [result, {"type": "text", "text": "Thanks."}]},
        ],
    )
    system, _, call, tool, thanks = as_messages(body.chat.messages)
    assert system == {"role": "system", "content": "Be brief."}
    assert call["tool_calls"][0]["function"] == {"name": "now", "arguments": {"zone": "UTC"}}
    assert (tool["role"], tool["tool_call_id"], tool["content"]) == ("tool", "1", "noon")
    assert thanks == {"role": "user", "content": "Thanks."}


@pytest.mark.parametrize("content", ["The sky is", [{"type": "text", "text": "The sky is"}]])
def test_a_final_message_of_the_assistant_is_continued(asker: Asker, content: Any) -> None:
    messages = [
        {"role": "user", "content": "What color is the sky?"},
        {"role": "assistant", "content": content},
    ]
    found = asker.ok(PATH, messages=messages, max_tokens=20)
    chat = asker.ok(
        "/v1/chat/completions",
        messages=messages,
        max_tokens=20,
        continue_final_message=True,
        add_generation_prompt=False,
    )
    assert found["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    usage = found["usage"]
    num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert num_prompt == chat["usage"]["prompt_tokens"] == 19
    counted = asker.ok(f"{PATH}/count_tokens", messages=messages)
    assert counted == {"input_tokens": num_prompt}


@pytest.mark.parametrize("content", ["no such city", [{"type": "text", "text": "no such city"}]])
def test_a_failed_call_says_so(content: Any) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": content}
    said = []
    for is_error in (True, False):
        one = {"role": "user", "content": [{**result, "is_error": is_error}]}
        [message] = as_messages(CountBody(messages=[one]).as_chat().messages)
        said.append(message["content"])
    assert said == ["Error: no such city", "no such city"]
    empty = {**result, "content": None, "is_error": True}
    [message] = CountBody(messages=[{"role": "user", "content": [empty]}]).as_chat().messages
    assert message["content"] == [{"type": "text", "text": "Error: "}]


def test_tokens_are_counted(asker: Asker) -> None:
    count = asker.ok(f"{PATH}/count_tokens", model="demo", messages=HELLO)
    assert count == {"input_tokens": len(asker.llm.tokenizer.apply_chat_template(HELLO))}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": HELLO},
        {"messages": HELLO, "max_tokens": 0},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 1},
        {"messages": HELLO, "max_tokens": 1, "tool_choice": {"type": "all"}},
        {"messages": HELLO, "max_tokens": 1, "max_token": 1},
    ],
)
def test_errors_have_anthropics_form(asker: Asker, fields: dict[str, Any]) -> None:
    answer = asker.post(PATH, fields)
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.json()["error"]["message"]


def test_a_key_in_anthropics_header_opens(asker: Asker) -> None:
    guarded = Asker(asker.llm, api_keys=("secret-of-this-test",))
    body = {"messages": HELLO, "max_tokens": 1}
    refused = guarded.post(PATH, body)
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    opened = guarded.post(PATH, body, headers={"x-api-key": "secret-of-this-test"})
    assert opened.status_code == 200
