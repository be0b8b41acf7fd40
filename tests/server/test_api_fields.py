"""The table of the fields of the APIs: every field of OpenAI's client is in it, and what it says is
what the server does.
"""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest

from enginebay_server.anthropic import CountBody, MessagesBody
from enginebay_server.api_fields import FIELDS_OF_PATH
from enginebay_server.bodies import Body
from enginebay_server.chat import ChatBody
from enginebay_server.completions import CompletionBody
from enginebay_server.responses import ResponsesBody
from tests.server.in_process_client import HELLO, Asker

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
BODIES: dict[str, type[Body]] = {
    CHAT: ChatBody,
    COMPLETIONS: CompletionBody,
    RESPONSES: ResponsesBody,
    MESSAGES: MessagesBody,
    f"{MESSAGES}/count_tokens": CountBody,
}
NEEDED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 1},
    COMPLETIONS: {"prompt": "One", "max_tokens": 1},
    RESPONSES: {"input": "One", "max_output_tokens": 1},
    MESSAGES: {"messages": HELLO, "max_tokens": 1},
    f"{MESSAGES}/count_tokens": {"messages": HELLO},
}
OPEN_RESPONSES = frozenset(
    """model input previous_response_id include tools tool_choice metadata text temperature top_p
    presence_penalty frequency_penalty parallel_tool_calls stream stream_options background
    max_output_tokens max_tool_calls reasoning safety_identifier prompt_cache_key truncation
    instructions store service_tier top_logprobs""".split()  # noqa: SIM905  # one field a word
)
"""The fields of the Open Responses specification of 2026-04-24."""


@pytest.mark.parametrize("path", FIELDS_OF_PATH)
def test_the_table_says_what_bodies_read(path: str) -> None:
    api, read = FIELDS_OF_PATH[path], set(BODIES[path].model_fields)
    if path.endswith("count_tokens"):  # the fields of an answer have no use there
        read |= set(MessagesBody.model_fields)
    assert api.honoured <= read
    assert not api.ignored.keys() & (read | api.refused.keys())
    assert not api.refused.keys() & (read - {"suffix"})
    assert BODIES[path].api_fields is api


def test_every_field_of_the_specifications_is_in_the_table() -> None:
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params
    from openai.types.responses import response_create_params

    specified = {
        CHAT: chat_create_params.CompletionCreateParamsBase,
        COMPLETIONS: completion_create_params.CompletionCreateParamsBase,
        RESPONSES: response_create_params.ResponseCreateParamsBase,
    }
    fields = {path: set(get_type_hints(kind)) for path, kind in specified.items()}
    fields[RESPONSES] |= OPEN_RESPONSES
    for path, names in fields.items():
        api = FIELDS_OF_PATH[path]
        assert names <= {"stream", *api.honoured, *api.ignored, *api.refused}, path


@pytest.mark.parametrize("path", FIELDS_OF_PATH)
def test_each_field_of_the_table_is_named_or_refused_with_its_reason(
    asker: Asker, path: str
) -> None:
    api = FIELDS_OF_PATH[path]
    answer = asker.post(path, {**NEEDED[path], **dict.fromkeys(api.ignored, "x")})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-enginebay-ignored"] == ", ".join(sorted(api.ignored))
    neutral = {name: one.neutral[0] for name, one in api.ignored.items() if one.neutral}
    answer = asker.post(path, {**NEEDED[path], **neutral})
    assert answer.status_code == 200, answer.text
    assert "x-enginebay-ignored" not in answer.headers
    for name, one in api.refused.items():
        answer = asker.post(path, {**NEEDED[path], name: "x"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == name
        assert one.why in answer.json()["error"]["message"]
