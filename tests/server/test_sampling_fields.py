"""Each sampling parameter is a field of a route's body that reaches SamplingParams, or is refused
with 400 and its name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from enginebay.types import SamplingParams
from enginebay_server.anthropic import MessagesBody
from enginebay_server.bodies import Body, check_unknown, sampling_params
from enginebay_server.chat import ChatBody
from enginebay_server.completions import CompletionBody, completion_params
from enginebay_server.errors import ApiError
from enginebay_server.json_bodies import read_body
from enginebay_server.responses import ResponsesBody
from enginebay_server.sampling_fields import HTTP_NAMES
from enginebay_server.settings import ServerSettings
from tests.sampling_values import UNKNOWN, run_with_top_a, some_value
from tests.server.in_process_client import HELLO

FIELDS = list(SamplingParams.model_fields)
NEEDED: dict[type[Body], dict[str, Any]] = {
    ChatBody: {"messages": HELLO},
    CompletionBody: {"prompt": "Hi"},
    ResponsesBody: {"input": "Hi"},
    MessagesBody: {"messages": HELLO, "max_tokens": 3},
}


def read(kind: type[Body], fields: dict[str, Any]) -> SamplingParams:
    """The SamplingParams of a body, which is read as the server reads it."""
    settings = ServerSettings()
    body: Any = read_body(kind, json.dumps(NEEDED[kind] | fields).encode(), 1000)
    check_unknown(body, settings)
    if kind is CompletionBody:
        return completion_params(body, settings)
    if kind is not ChatBody:
        body = body.chat if kind is MessagesBody else body.as_chat(HELLO)
    return sampling_params(body, settings, max_tokens=None, logprobs=body.num_logprobs)


@pytest.mark.parametrize("kind", NEEDED)
@pytest.mark.parametrize("field", FIELDS)
def test_a_route_reads_a_parameter_or_refuses_it_by_name(field: str, kind: type[Body]) -> None:
    name, value = HTTP_NAMES.get(field, field), some_value(field)
    if name not in kind.model_fields:
        with pytest.raises(ApiError, match=name) as refusal:
            read(kind, {name: value})
        assert (refusal.value.status, refusal.value.param) == (400, name)
    elif field not in ("max_tokens", "logprobs"):  # which have meanings of their own in each API
        expected = SamplingParams(**{field: value})
        assert getattr(read(kind, {name: value}), field) == getattr(expected, field)


@pytest.mark.parametrize("kind", NEEDED)
def test_a_name_that_is_no_parameter_is_refused(kind: type[Body]) -> None:
    with pytest.raises(ApiError, match=UNKNOWN) as refusal:
        read(kind, {UNKNOWN: 1})
    assert (refusal.value.status, refusal.value.param) == (400, UNKNOWN)


SCRIPT = """
from enginebay_server.chat import ChatBody
from enginebay_server.completions import CompletionBody
from tests.server.test_sampling_fields import read

field = ChatBody.model_json_schema()["properties"]["top_a"]
assert CompletionBody.model_json_schema()["properties"]["top_a"] == field
print(read(ChatBody, {"top_a": 0.25}).top_a, field["anyOf"][0], field["description"])
try:
    read(CompletionBody, {"top_a": 1.5})
except Exception as error:
    print(error.status, error.param)
"""


def test_a_new_parameter_is_a_field_of_chats_and_completions(tmp_path: Path) -> None:
    right, wrong = run_with_top_a(tmp_path, SCRIPT).splitlines()
    assert right == (
        "0.25 {'maximum': 1.0, 'minimum': 0.0, 'type': 'number'} "
        "drop tokens below top_a times the square of the best one's"
    )
    assert wrong == "400 top_a"
