"""Fields of the APIs that are null, or that ask for nothing, are accepted: clients send them."""

from __future__ import annotations

from typing import Any

import pytest

from enginebay_server.anthropic import CountBody, MessagesBody
from enginebay_server.api_fields import UNREAD_NAMES
from enginebay_server.bodies import Body
from enginebay_server.chat import ChatBody
from enginebay_server.completions import CompletionBody
from enginebay_server.embeddings import EmbeddingBody
from enginebay_server.response_items import input_messages
from enginebay_server.responses import ResponsesBody
from enginebay_server.routes_tokens import DetokenizeBody, TokenizeBody
from tests.server.in_process_client import HELLO, Asker

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BODIES: dict[type[Body], dict[str, Any]] = {
    ChatBody: {"messages": HELLO},
    CompletionBody: {"prompt": "Hi"},
    ResponsesBody: {"input": "Hi"},
    MessagesBody: {"messages": HELLO, "max_tokens": 3},
    CountBody: {"messages": HELLO},
    EmbeddingBody: {"input": "Hi"},
    TokenizeBody: {"prompt": "Hi"},
    DetokenizeBody: {"tokens": [1]},
}
REFUSAL = {"type": "refusal", "refusal": "no"}
CASES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"modalities": ["text"]}),
    (CHAT, {"verbosity": "low"}),
    (CHAT, {"functions": None, "function_call": None}),
    (CHAT, {"functions": [], "function_call": "none"}),
    (CHAT, {"logprobs": False, "top_logprobs": 0}),
    (CHAT, {"stream": False, "stream_options": {}}),
    (CHAT, {"stream": False, "stream_options": {"include_usage": None}}),
    (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": [REFUSAL]}, *HELLO]}),
    (RESPONSES, {"top_logprobs": 0}),
    (RESPONSES, {"max_tool_calls": 3}),
    (RESPONSES, {"stream_options": {"include_obfuscation": False}}),
    (RESPONSES, {"include": ["message.output_text.logprobs"]}),
    (RESPONSES, {"input": [{"type": "message", "role": "assistant", "content": [REFUSAL]}]}),
    (MESSAGES, {"cache_control": {"type": "ephemeral"}}),
    (MESSAGES, {"mcp_servers": []}),
    (MESSAGES, {"output_config": {"effort": "low"}}),
    (MESSAGES, {"context_management": {"edits": []}}),
    *((path, dict.fromkeys(UNREAD_NAMES)) for path in (CHAT, RESPONSES, MESSAGES)),
]


@pytest.mark.parametrize("kind", BODIES)
def test_every_field_that_may_be_left_out_may_be_null(kind: type[Body]) -> None:
    needed = BODIES[kind]
    optional = {name for name, field in kind.model_fields.items() if not field.is_required()}
    body = kind(**dict.fromkeys(optional - needed.keys()), **needed)
    assert body == kind(**needed)


def test_fields_that_ask_for_nothing_are_accepted(asker: Asker) -> None:
    for path, fields in CASES:
        needed = {"input": "Hi"} if path == RESPONSES else {"messages": HELLO}
        lengths = {"max_output_tokens": 1} if path == RESPONSES else {"max_tokens": 1}
        answer = asker.post(path, {**needed, **lengths, **fields})
        assert answer.status_code == 200, (path, fields, answer.text)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"modalities": ["text", "audio"]}),
        (CHAT, {"functions": [{"name": "f"}]}),
        (RESPONSES, {"conversation": "conv_1"}),
        (RESPONSES, {"prompt": {"id": "pmpt_1"}}),
        (RESPONSES, {"moderation": {"model": "m"}}),
    ],
)
def test_fields_that_ask_for_something_are_refused(
    asker: Asker, path: str, fields: dict[str, Any]
) -> None:
    needed = {"input": "Hi"} if path == RESPONSES else {"messages": HELLO, "max_tokens": 1}
    answer = asker.post(path, {**needed, **fields})
    assert answer.status_code == 400
    assert "not supported here" in answer.json()["error"]["message"]


def test_the_call_of_a_custom_tool_reaches_the_conversation() -> None:
    head = {"call_id": "c", "name": "apply_patch"}
    messages = input_messages(
        [
            {**head, "type": "custom_tool_call", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
        ]
    )
    function = {"name": "apply_patch", "arguments": '{"input": "x"}'}
    assert messages[0]["tool_calls"] == [{"id": "c", "type": "function", "function": function}]
    assert messages[1] == {"role": "tool", "tool_call_id": "c", "content": "done"}


def test_usage_of_a_response_has_the_fields_of_openai(asker: Asker) -> None:
    usage = asker.ok(RESPONSES, input="Hi", max_output_tokens=1)["usage"]
    assert usage["input_tokens_details"].keys() == {"cached_tokens", "cache_write_tokens"}
    assert usage["input_tokens_details"]["cache_write_tokens"] == 0


def test_a_response_names_an_include_that_it_does_not_know(asker: Asker) -> None:
    wanted = {"input": "Hi", "max_output_tokens": 2}
    answer = asker.post(RESPONSES, {**wanted, "include": ["message.output_text.mood"]})
    assert answer.status_code == 200
    assert answer.headers["x-enginebay-ignored"] == "include"
    for known in ("reasoning.encrypted_content", "message.output_text.logprobs"):
        others = asker.post(RESPONSES, {**wanted, "include": [known]})
        assert "x-enginebay-ignored" not in others.headers
