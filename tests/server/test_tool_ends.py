"""How answers with tools end: calls that are cut off, stop texts, several completions, and the same
in a stream.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from enginebay_server import tools
from enginebay_server.parsing.constrained import calls_schema
from tests.server.in_process_client import HELLO, Asker, events_of, reasons_of

if TYPE_CHECKING:
    from enginebay import LLM

PATH = "/v1/chat/completions"
PARSERS = {"tool_parser": "hermes", "reasoning_parser": "think"}
AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["age"],
    "additionalProperties": False,
}
SET_AGE = {"type": "function", "function": {"name": "set_age", "parameters": AGE}}
NAMED = {"type": "function", "function": {"name": "set_age"}}
CALL = '<tool_call>{"name": "set_age", "arguments": {"age": 7}}</tool_call>'


@pytest.fixture
def parsing(asker: Asker) -> Asker:
    return Asker(asker.llm, PARSERS)


def message_of(events: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """Content, reasoning and calls of a choice, joined from the deltas of a stream."""
    content = reasoning = ""
    calls: list[dict[str, str]] = []
    for choice in (c for event in events for c in event["choices"] if c["index"] == index):
        content += choice["delta"].get("content") or ""
        reasoning += choice["delta"].get("reasoning_content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                calls.append({"name": call["function"]["name"], "arguments": ""})
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
    return {"content": content, "reasoning": reasoning, "calls": calls}


def ask(asker: Asker, index: int = 0, **fields: Any) -> tuple[dict[str, Any], str]:
    """The message and finish reason of a choice, which are the same in a stream."""
    fields = {"messages": HELLO, "max_tokens": 100, "tools": [SET_AGE], **fields}
    choice = asker.ok(PATH, **fields)["choices"][index]
    whole = choice["message"]
    message = {
        "content": whole["content"] or "",
        "reasoning": whole.get("reasoning_content", ""),
        "calls": [call["function"] for call in whole.get("tool_calls", ())],
    }
    events = asker.events(PATH, **fields)
    assert message_of(events, index) == message
    assert reasons_of(events, index) == [choice["finish_reason"]]
    return message, choice["finish_reason"]


def test_completions_have_calls_of_their_own(parsing: Asker) -> None:
    for index in range(2):
        message, reason = ask(parsing, index, n=2, guided_choice=[CALL])
        assert message["calls"] == [{"name": "set_age", "arguments": '{"age": 7}'}]
        assert reason == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "reason"), [({"max_tokens": 20}, "length"), ({"stop": '"age": 7'}, "stop")]
)
def test_a_call_that_is_cut_off_is_content(
    parsing: Asker, fields: dict[str, Any], reason: str
) -> None:
    message, found = ask(parsing, guided_choice=[CALL], **fields)
    assert (message["calls"], found) == ([], reason)
    assert CALL.startswith(message["content"])
    assert len(message["content"]) > len("<tool_call>")


def test_a_stop_text_behind_a_call_ends_the_answer_and_the_call_stays(parsing: Asker) -> None:
    message, reason = ask(parsing, stop="</tool_call>", guided_choice=[CALL])
    assert (message["content"], len(message["calls"]), reason) == ("", 1, "tool_calls")


def test_invalid_json_in_a_call_is_content(parsing: Asker) -> None:
    text = '<tool_call>{"name": set_age}</tool_call>'
    message, reason = ask(parsing, guided_choice=[text])
    assert (message["content"], message["calls"], reason) == (text, [], "stop")


@pytest.mark.parametrize(
    ("choice", "fields", "reason"),
    [
        ("required", {"stop": 'age":'}, "stop"),
        (NAMED, {"max_tokens": 2}, "length"),
        (NAMED, {"stop": "age"}, "stop"),
    ],
)
def test_a_demanded_call_that_is_cut_off_keeps_the_reason(
    asker: Asker, choice: Any, fields: dict[str, Any], reason: str
) -> None:
    message, found = ask(asker, tool_choice=choice, **fields)
    assert found == reason
    [call] = message["calls"]
    assert call["name"] == "set_age"
    with pytest.raises(json.JSONDecodeError):
        json.loads(call["arguments"])


def test_parameters_may_refer_to_definitions_of_their_own(asker: Asker) -> None:
    node = {"properties": {"next": {"$ref": "#/$defs/node"}, "id": {"const": 5}}}
    shape = {**node, "type": "object", "required": ["id"], "additionalProperties": False}
    function = {"name": "plant", "parameters": {**shape, "$defs": {"node": shape}}}
    tools = [{"type": "function", "function": function}, SET_AGE]
    asker = Asker(asker.llm, {"tool_prompt": "none"})  # the schema is longer than the context
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}
    message, _ = ask(asker, tools=tools, **fields)
    [call] = message["calls"]
    assert call["name"] in ("plant", "set_age")


def test_an_answer_with_a_form_is_no_reasoning_that_the_prompt_has_begun(llm: LLM) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %} <think>"
    asker = Asker(llm, {**PARSERS, "chat_template": template})
    free, _ = ask(asker, tools=None, max_tokens=4)
    assert (free["content"], bool(free["reasoning"])) == ("", True)
    formed, _ = ask(asker, tools=None, guided_choice=["yes", "no"])
    assert formed["content"] in ("yes", "no")
    assert formed["reasoning"] == ""


def test_tools_that_the_model_would_not_see_are_refused(asker: Asker) -> None:
    asker = Asker(asker.llm, {"tool_prompt": "none"})
    error = asker.refused(PATH, 400, messages=HELLO, tools=[SET_AGE])
    assert error["param"] == "tools"
    unparsed = Asker(asker.llm, {"tool_parser": "none"})
    message, _ = ask(unparsed, guided_choice=[CALL])
    assert (message["content"], message["calls"]) == (CALL, [])


def test_explain_names_the_parsers(parsing: Asker, asker: Asker) -> None:
    for one, names in ((parsing, ["hermes", "think"]), (asker, ["json", "none"])):
        choices = one.get("/explain").json()["demo"]["choices"]
        by_setting = {choice["setting"]: choice["chosen"] for choice in choices}
        assert [by_setting["tool_parser"], by_setting["reasoning_parser"]] == names


def test_openais_client_joins_the_calls_of_a_stream(parsing: Asker) -> None:
    import asyncio

    import httpx
    import openai

    async def read() -> Any:
        transport = httpx.ASGITransport(parsing.app)
        async with openai.AsyncOpenAI(
            base_url="http://server/v1",
            api_key="unused",
            http_client=httpx.AsyncClient(transport=transport),
        ) as client:
            stream = client.beta.chat.completions.stream(
                model="demo",
                messages=HELLO,  # type: ignore[arg-type]
                tools=[SET_AGE],  # type: ignore[list-item]
                max_tokens=100,
                extra_body={"guided_choice": [f"Sure. {CALL}"]},
            )
            async with stream as events:
                return await events.get_final_completion()

    [choice] = asyncio.run(read()).choices
    assert (choice.message.content, choice.finish_reason) == ("Sure.", "tool_calls")
    [call] = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("set_age", '{"age": 7}')


FLAT_AGE = {"type": "function", "name": "set_age", "parameters": AGE}
DEMANDS: dict[str, dict[str, Any]] = {
    PATH: {"messages": HELLO, "tools": [SET_AGE], "tool_choice": "required"},
    "/v1/responses": {"input": "Hello!", "tools": [FLAT_AGE], "tool_choice": "required"},
    "/v1/messages": {
        "messages": HELLO,
        "tools": [{"name": "set_age", "input_schema": AGE}],
        "tool_choice": {"type": "any"},
    },
}
"""Bodies that demand calls, by path."""


def texts_and_calls(answer: dict[str, Any]) -> tuple[list[str], int]:
    """The texts of a whole answer of any API, and the number of its calls."""
    if "choices" in answer:
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls", ())
        return [message["content"]] if message["content"] else [], len(calls)
    items = answer.get("output", answer.get("content", []))
    calls = [one for one in items if one["type"] in ("function_call", "tool_use")]
    return [str(one) for one in items if one not in calls], len(calls)


@pytest.mark.parametrize("path", DEMANDS)
def test_a_second_call_that_the_length_cuts_leaves_no_punctuation_as_text(
    asker: Asker, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the list of calls is cut, its brackets and commas are no content."""

    def several(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**calls_schema(*args, **kwargs), "minItems": 3}

    monkeypatch.setattr(tools, "calls_schema", several)
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    bodies = [{**DEMANDS[path], limit: count} for count in range(20, 92, 3)]
    plain = Asker(asker.llm, {"tool_prompt": "none"})
    answers = plain.all(*(("POST", path, {"json": body}) for body in bodies))
    found = [texts_and_calls(answer.json()) for answer in answers]
    assert not any(texts for texts, _ in found), found
    assert {1, 2} <= {num_calls for _, num_calls in found}
    streams = plain.all(*(("POST", path, {"json": {**body, "stream": True}}) for body in bodies))
    for stream in streams:
        assert stream.status_code == 200
        assert "output_text" not in stream.text
        assert "text_delta" not in stream.text
        if path == PATH:
            events = [json.loads(one) for one in events_of(stream.text)[:-1]]
            assert message_of(events, 0)["content"] == ""
