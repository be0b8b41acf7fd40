"""The text that describes tools to a model whose chat template has no place for them."""

from __future__ import annotations

from typing import Any

from enginebay_server.tool_prompt import HOW_TO_CALL, described_tools, with_described_tools
from enginebay_server.tools import ToolUse, tool_use

NOW: dict[str, Any] = {
    "type": "function",
    "function": {"name": "now", "description": "The time.", "strict": True},
}
TOOL = '{"name":"now","description":"The time."}'
USE = tool_use([NOW], None, several=True)
HELLO: dict[str, Any] = {"role": "user", "content": "Hello!"}


def call(number: int, **arguments: Any) -> dict[str, Any]:
    function = {"name": "now", "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


def result(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


def test_the_text_ends_the_one_system_message() -> None:
    system = {"role": "system", "content": "Be brief."}
    text = f"{HOW_TO_CALL}\n{TOOL}"
    assert described_tools(USE) == text
    found = with_described_tools([system, HELLO], USE, takes_system=True)
    assert found == [{"role": "system", "content": f"Be brief.\n\n{text}"}, HELLO]
    found = with_described_tools([HELLO], USE, takes_system=True)
    assert found == [{"role": "system", "content": text}, HELLO]
    [found_first] = with_described_tools([HELLO], USE, takes_system=False)
    assert found_first == {"role": "user", "content": f"{text}\n\nHello!"}
    assert with_described_tools([system, HELLO], ToolUse(), takes_system=True) == [system, HELLO]


def test_a_demanded_call_is_described_by_the_form_of_its_answer() -> None:
    required = described_tools(tool_use([NOW], "required", several=True))
    assert required.startswith("Call a tool: answer with a list of ")
    choice = {"type": "function", "function": {"name": "now"}}
    named = described_tools(tool_use([NOW], choice, several=True))
    assert named == f"Answer with the arguments of now as JSON. The tools:\n{TOOL}"


def test_roles_alternate_with_calls_and_results_as_texts() -> None:
    messages = [
        HELLO,
        {"role": "assistant", "content": "I look.", "tool_calls": [call(1, zone="UTC"), call(2)]},
        result(1, "noon"),
        result(2, "one"),
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "", "tool_calls": [call(3)]},
        result(4, "two"),
        {"role": "tool", "name": "later", "content": "three"},
    ]
    found = with_described_tools(messages, ToolUse(), takes_system=True)
    first = '{"name": "now", "arguments": {"zone": "UTC"}}'
    second = '{"name": "now", "arguments": {}}'
    assert found == [
        HELLO,
        {"role": "assistant", "content": f"I look.\n[{first}, {second}]"},
        {"role": "user", "content": "Result of now:\nnoon\n\nResult of now:\none\n\nWell?"},
        {"role": "assistant", "content": second},
        {"role": "user", "content": "Result:\ntwo\n\nResult of later:\nthree"},
    ]
    assert messages[1]["tool_calls"], "the conversation of the request is not changed"
