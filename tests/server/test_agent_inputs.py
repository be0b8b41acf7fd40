"""Parts of bodies that coding agents send: items, blocks, custom tools of chats, schemas."""

from __future__ import annotations

import json
import re
from typing import Any, get_args, get_type_hints

import pytest

from enginebay_server.anthropic import CountBody, MessagesBody
from enginebay_server.errors import ApiError
from enginebay_server.messages_in import as_messages
from enginebay_server.response_items import (
    CALLS,
    NOT_SHOWN,
    OUTPUTS,
    REFUSED_ITEMS,
    input_messages,
)
from enginebay_server.responses import ResponsesBody
from tests.server.in_process_client import HELLO, Asker, reasons_of
from tests.server.test_tools import NOW, PARSERS, says

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
WRITE: dict[str, Any] = {"type": "custom", "custom": {"name": "write", "description": "Writes."}}
WRITTEN = '<tool_call>{"name": "write", "arguments": {"input": "a \\"b\\"\\n"}}</tool_call>'


def test_every_item_type_of_openai_is_read_or_refused_with_a_reason() -> None:
    from openai.types.responses import response_input_param

    kinds: set[str] = set()
    for item in get_args(response_input_param.ResponseInputItemParam):
        for literal in get_args(get_type_hints(item).get("type")):
            kinds.update(one for one in (*get_args(literal), literal) if isinstance(one, str))
    known = {"message", "reasoning", "item_reference", *CALLS, *OUTPUTS, *NOT_SHOWN}
    assert len(kinds) > 20
    assert kinds <= known | REFUSED_ITEMS.keys()
    for kind, why in REFUSED_ITEMS.items():
        with pytest.raises(ApiError, match=why):
            input_messages([{"type": kind}])
    assert input_messages([{"type": kind} for kind in NOT_SHOWN]) == []


@pytest.mark.parametrize("kind", ["nothing", [], {}, 3, True])
def test_an_item_of_another_type_is_refused(asker: Asker, kind: Any) -> None:
    assert asker.refused(RESPONSES, 400, input=[{"type": kind}])["param"] == "input.0"


def test_calls_of_shells_and_patches_are_calls_with_results() -> None:
    action = {"type": "exec", "command": ["ls"]}
    patch = {"type": "delete_file", "path": "a"}
    messages = input_messages(
        [
            {"type": "local_shell_call", "call_id": "1", "action": action},
            {"type": "local_shell_call_output", "id": "1", "output": "a"},
            {"type": "shell_call", "call_id": "2", "action": {"commands": ["ls"]}},
            {
                "type": "shell_call_output",
                "call_id": "2",
                "output": [{"stdout": "a\n", "stderr": "no b", "outcome": {"type": "exit"}}],
            },
            {"type": "apply_patch_call", "call_id": "3", "operation": patch},
            {"type": "apply_patch_call_output", "call_id": "3", "output": "done"},
            {"type": "mcp_call", "id": "4", "server_label": "s", "name": "f", "output": "x"},
        ]
    )
    calls = [one["tool_calls"][0] for one in messages if one["role"] == "assistant"]
    found = [(one["id"], one["function"]["name"]) for one in calls]
    assert found == [("1", "local_shell"), ("2", "shell"), ("3", "apply_patch"), ("4", "s__f")]
    assert json.loads(calls[0]["function"]["arguments"]) == action
    assert json.loads(calls[2]["function"]["arguments"]) == patch
    results = [(one["tool_call_id"], one["content"]) for one in messages if one["role"] == "tool"]
    assert results == [("1", "a"), ("2", "a\nno b"), ("3", "done"), ("4", "x")]


def test_calls_belong_to_the_message_before_them() -> None:
    call = {"type": "function_call", "name": "now", "arguments": "{}"}
    [message] = input_messages(
        [
            {"role": "assistant", "content": "I look."},
            {**call, "call_id": "1"},
            {**call, "call_id": "2"},
        ]
    )
    assert message["content"] == "I look."
    assert [one["id"] for one in message["tool_calls"]] == ["1", "2"]


def thought(text: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": text}


def test_reasoning_of_earlier_turns_reaches_the_chat_template_in_its_message() -> None:
    """A template decides itself which of it to show."""
    call = {"type": "function_call", "call_id": "1", "name": "now", "arguments": "{}"}
    parts = [{"type": "reasoning_text", "text": one} for one in ("Time ", "matters.")]
    messages = input_messages(
        [
            {"role": "user", "content": "When?"},
            thought(parts),
            {"role": "assistant", "content": "I look."},
            call,
            thought([{"type": "reasoning_text", "text": "Again."}]),
            {**call, "call_id": "2"},
            {"type": "function_call_output", "call_id": "2", "output": "noon"},
            {"type": "reasoning", "summary": [{"text": "A summary."}], "encrypted_content": "x"},
            {"role": "assistant", "content": "Noon."},
            thought(parts),
            {"role": "user", "content": "Thanks."},
        ]
    )
    found = [(one["role"], one.get("reasoning_content")) for one in messages]
    assert found == [
        ("user", None),
        ("assistant", "Time matters."),
        ("assistant", "Again."),
        ("tool", None),
        ("assistant", None),
        ("user", None),
    ]
    assert [[one["id"] for one in each.get("tool_calls", [])] for each in messages[1:3]] == [
        ["1"],
        ["2"],
    ]


@pytest.mark.parametrize("content", ["x", [3], [{"type": "reasoning_text", "text": 3}], {}])
def test_malformed_reasoning_is_refused(asker: Asker, content: Any) -> None:
    items = [thought(content), {"role": "assistant", "content": "a"}, *HELLO]
    assert asker.refused(RESPONSES, 400, input=items)["param"] == "input.0.content"


def test_thinking_of_earlier_turns_reaches_the_chat_template() -> None:
    def blocks(*texts: Any) -> list[dict[str, Any]]:
        return [{"type": "thinking", "thinking": text, "signature": ""} for text in texts]

    answer = {"type": "text", "text": "Noon."}
    hidden = {"type": "redacted_thinking", "data": "x"}
    made = CountBody(
        messages=[
            *HELLO,
            {"role": "assistant", "content": [*blocks("So ", "noon."), hidden, answer]},
            {"role": "user", "content": [{"type": "text", "text": "Thanks."}, *blocks("no")]},
        ]
    )
    _, message, thanks = as_messages(made.as_chat().messages)
    assert message == {
        "role": "assistant",
        "content": "Noon.",
        "reasoning_content": "So noon.",
    }
    assert "reasoning_content" not in thanks


def test_malformed_thinking_is_refused(asker: Asker) -> None:
    said = [{"type": "thinking", "thinking": 3}]
    messages = [*HELLO, {"role": "assistant", "content": said}, *HELLO]
    answer = asker.post(MESSAGES, {"messages": messages, "max_tokens": 1})
    assert answer.status_code == 400
    assert "messages.1.content.0" in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_of_a_chat_is_called_with_its_text(asker: Asker, stream: bool) -> None:
    parsing = Asker(asker.llm, PARSERS)
    body = says(WRITTEN, tools=[WRITE, NOW, {"type": "web_search"}])
    if stream:
        events = parsing.events(CHAT, **body)
        deltas = [
            call
            for event in events
            for choice in event["choices"]
            for call in choice["delta"].get("tool_calls", ())
        ]
        call = deltas[0]
        call["custom"]["input"] += "".join(one["custom"]["input"] for one in deltas[1:])
        assert reasons_of(events) == ["tool_calls"]
    else:
        answer = parsing.post(CHAT, body)
        assert answer.headers["x-enginebay-ignored"] == "tools.web_search"
        [call] = answer.json()["choices"][0]["message"]["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "write", "input": 'a "b"\n'})
    turns = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "done"},
    ]
    [written] = as_messages(turns)[1]["tool_calls"]
    assert written["function"] == {"name": "write", "arguments": {"input": 'a "b"\n'}}
    parsing.ok(CHAT, messages=turns, max_tokens=1)


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "allowed_tools": {"tools": [3]}},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": NOW, "tools": [NOW]},
        },
        {"type": "allowed_tools", "allowed_tools": {"mode": "all", "tools": [NOW]}},
        {"type": "custom", "custom": {"name": "nothing"}},
    ],
)
def test_malformed_choices_are_refused(asker: Asker, choice: Any) -> None:
    error = asker.refused(CHAT, 400, messages=HELLO, tools=[NOW, WRITE], tool_choice=choice)
    assert error["param"] == "tool_choice"


@pytest.mark.parametrize("form", [{"type": "yaml"}, 3, {"type": "grammar", "definition": 3}])
def test_an_unknown_format_of_a_custom_tool_is_refused(form: Any) -> None:
    tool = {"type": "custom", "name": "write", "format": form}
    with pytest.raises(ApiError, match="grammar"):
        _ = ResponsesBody(input="a", tools=[tool]).as_chat(HELLO).tool_use


def blocks(*given: dict[str, Any]) -> CountBody:
    return CountBody(messages=[{"role": "user", "content": list(given)}])


def test_blocks_that_have_text_in_another_form_are_read() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "The cat sat."}
    parts = {"type": "content", "content": [{"type": "text", "text": "It slept."}]}
    found = {"title": "Cats", "source": "cats.txt", "content": [{"type": "text", "text": "Meow."}]}
    body = blocks(
        {"type": "document", "source": source, "title": "Story"},
        {"type": "document", "source": parts},
        {"type": "search_result", **found},
        {"type": "compaction", "content": "They talked."},
    )
    [message] = body.as_chat().messages
    assert message["content"] == "Story\nThe cat sat.It slept.Cats\ncats.txt\nMeow.They talked."
    result = {
        "type": "tool_result",
        "tool_use_id": "1",
        "content": [{"type": "tool_reference", "tool_name": "Bash"}],
    }
    [message] = as_messages(blocks(result).as_chat().messages)
    assert (message["role"], message["content"]) == ("tool", "Bash")


def test_blocks_of_tools_of_anthropic_are_left_out_and_named() -> None:
    use = {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}}
    body = blocks(use, {"type": "text", "text": "Well?"})
    assert body.ignored_parts == ["messages.server_tool_use"]
    assert body.as_chat().messages == [{"role": "user", "content": "Well?"}]


def test_a_system_block_between_messages_joins_the_system_text() -> None:
    text = [{"type": "text", "text": "Be brief."}]
    body = blocks({"type": "mid_conv_system", "content": text}, {"type": "text", "text": "Well?"})
    assert body.as_chat().messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Well?"},
    ]


def test_an_answer_before_a_system_message_is_not_continued() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Hi"}]
    late = {"role": "system", "content": "Be brief."}
    assert CountBody(messages=messages).as_chat().continue_final_message
    assert not CountBody(messages=[*messages, late]).as_chat().continue_final_message


@pytest.mark.parametrize("kind", ["image", "document"])
def test_images_and_files_are_refused_with_the_reason(asker: Asker, kind: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    message = {"role": "user", "content": [{"type": kind, "source": source}]}
    answer = asker.post(MESSAGES, {"messages": [message], "max_tokens": 1})
    assert answer.status_code == 400
    assert "Models here read text alone" in answer.json()["error"]["message"]


@pytest.mark.parametrize("place", ["output_config", "output_format"])
def test_the_schema_of_a_message_holds(asker: Asker, place: str) -> None:
    form = {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}
    fields = {place: {"format": form} if place == "output_config" else form}
    message = asker.ok(MESSAGES, messages=HELLO, max_tokens=20, **fields)
    assert re.fullmatch('"(yes|no)"', message["content"][0]["text"])


def test_penalties_of_a_response_reach_the_model() -> None:
    body = ResponsesBody(input="a", presence_penalty=0.5, frequency_penalty=0.25)
    made = body.as_chat(HELLO)
    assert (made.presence_penalty, made.frequency_penalty) == (0.5, 0.25)


def test_efforts_and_lengths_of_a_message_reach_the_chat() -> None:
    chat = MessagesBody(messages=HELLO, max_tokens=7, output_config={"effort": "max"}).chat
    assert (chat.max_tokens, chat.reasoning_effort) == (7, "max")
