"""Tool calls and reasoning over HTTP. The output is held to a text, so that the demo model writes
calls.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.server.in_process_client import HELLO, Asker, reasons_of

PATH = "/v1/chat/completions"
PARSERS = {"tool_parser": "hermes", "reasoning_parser": "think"}
NOW = {"type": "function", "function": {"name": "now"}}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two digits.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 9},
                "b": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


@pytest.fixture
def parsing(asker: Asker) -> Asker:
    return Asker(asker.llm, PARSERS)


def says(text: str, **fields: Any) -> dict[str, Any]:
    """A body whose answer is this text."""
    return {"messages": HELLO, "guided_regex": re.escape(text), "max_tokens": 200, **fields}


def joined(events: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message that the deltas of a stream are together."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for choice in (c for event in events for c in event["choices"] if c["index"] == index):
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append(dict(call["function"]))
            else:
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message


def functions(message: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = [call.get("function", call) for call in message.get("tool_calls", ())]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def test_calls_and_reasoning_are_found_whole_and_streamed(parsing: Asker) -> None:
    text = f"<think>What time is it?</think>I look.{CALL}{CALL}"
    body = says(text, tools=[NOW, ADD])
    [choice] = parsing.ok(PATH, **body)["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["reasoning_content"] == "What time is it?"
    assert message["content"] == "I look."
    assert functions(message) == [("now", {}), ("now", {})]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    events = parsing.events(PATH, **body)
    found = joined(events)
    assert reasons_of(events) == ["tool_calls"]
    assert (found["content"], found["reasoning_content"]) == ("I look.", "What time is it?")
    assert functions(found) == functions(message)


def test_a_call_alone_has_no_content(parsing: Asker) -> None:
    [choice] = parsing.ok(PATH, **says(CALL, tools=[NOW]))["choices"]
    assert choice["message"]["content"] is None


def test_calls_after_the_first_are_left_out_where_one_is_wanted(parsing: Asker) -> None:
    body = says(CALL + CALL, tools=[NOW], parallel_tool_calls=False)
    assert len(parsing.ok(PATH, **body)["choices"][0]["message"]["tool_calls"]) == 1
    assert len(joined(parsing.events(PATH, **body))["tool_calls"]) == 1


@pytest.mark.parametrize("fields", [{}, {"tools": [NOW], "tool_choice": "none"}])
def test_without_tools_a_call_is_text(parsing: Asker, fields: dict[str, Any]) -> None:
    [choice] = parsing.ok(PATH, **says(CALL, **fields))["choices"]
    assert choice["message"]["content"] == CALL
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off_is_text_and_ends_for_its_length(
    parsing: Asker, stream: bool
) -> None:
    body = says(CALL, tools=[NOW], max_tokens=8)
    if stream:
        events = parsing.events(PATH, **body)
        message, reasons = joined(events), reasons_of(events)
    else:
        [choice] = parsing.ok(PATH, **body)["choices"]
        message, reasons = choice["message"], [choice["finish_reason"]]
    assert reasons == ["length"]
    assert message["content"]
    assert CALL.startswith(message["content"])
    assert not message.get("tool_calls")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_that_is_demanded_is_made(asker: Asker, choice: Any, stream: bool) -> None:
    asker = Asker(asker.llm, {"tool_prompt": "none"})  # the text for tools fills the context
    body = {
        "messages": HELLO, "tools": [ADD], "tool_choice": choice, "max_tokens": 100,
        "parallel_tool_calls": False,
    }  # fmt: skip
    if stream:
        events = asker.events(PATH, **body)
        message, reasons = joined(events), reasons_of(events)
    else:
        [answer] = asker.ok(PATH, **body)["choices"]
        message, reasons = answer["message"], [answer["finish_reason"]]
    [(name, arguments)] = functions(message)
    assert name == "add"
    assert set(arguments) == {"a", "b"}
    assert all(0 <= value <= 9 for value in arguments.values())
    assert reasons == ["tool_calls"]


def test_tools_and_calls_of_the_conversation_are_in_the_prompt(asker: Asker) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    template = (
        "{{ tools | tojson }} {% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.items() | list }}{% endfor %} "
        "{% endfor %}{{ reasoning_effort }}"
    )
    asker = Asker(asker.llm, {"chat_template": template})
    body = {"messages": messages, "tools": [NOW], "reasoning_effort": "low", "max_tokens": 1}
    prompts: list[Any] = []
    submit = asker.llm.submit

    def seen(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        prompts.append(asker.llm.tokenizer.decode(prompt))
        return submit(prompt, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asker.llm, "submit", seen)
        asker.ok(PATH, **body)
        asker.ok(PATH, **body, tool_choice="none")
    with_tools, without = prompts
    assert '"name": "now"' in with_tools
    assert "tool: noon" in with_tools
    assert with_tools.endswith("low")
    assert without.startswith("null ")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0"),
        ({"tools": [NOW, NOW]}, "tools"),
        ({"tools": [NOW], "tool_choice": "always"}, "tool_choice"),
        (
            {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls"),
    ],
)
def test_wrong_tools_are_refused(asker: Asker, fields: dict[str, Any], param: str) -> None:
    error = asker.refused(PATH, 400, **{"messages": HELLO, "max_tokens": 1, **fields})
    assert error["param"] == param


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"type": "nonsense"}, "tools.0.function.parameters.type"),
        ({"type": 5}, "tools.0.function.parameters.type"),
        ({"type": ["string"]}, "tools.0.function.parameters.type"),
        ({"type": "object", "properties": {"a": {"type": "nonsense"}}}, "json_schema"),
        ({"type": "object", "required": 5}, "json_schema"),
    ],
)
def test_a_demanded_tool_with_a_wrong_schema_is_refused(
    asker: Asker, parameters: dict[str, Any], param: str, choice: Any
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    error = asker.refused(PATH, 400, messages=HELLO, tools=[tool], tool_choice=choice)
    assert error["param"] == param


def test_log_probabilities_of_parsed_tokens_are_all_there(parsing: Asker) -> None:
    body = says(f"<think>So.</think>{CALL}", tools=[NOW], logprobs=True)
    [choice] = parsing.ok(PATH, **body)["choices"]
    events = parsing.events(PATH, **body)
    told = [c["logprobs"] for event in events for c in event["choices"] if c["logprobs"]]
    tokens = [entry["token"] for one in told for entry in one["content"]]
    assert tokens == [entry["token"] for entry in choice["logprobs"]["content"]]


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "array"},
        {"$ref": "#/$defs/L", "$defs": {"L": {"type": "array"}}},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
    ],
)
def test_parameters_that_allow_no_object_are_refused(asker: Asker, parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    error = asker.refused(PATH, 400, messages=HELLO, tools=[tool])
    assert "the arguments of a call are an object" in error["message"]
