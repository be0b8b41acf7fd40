"""Coding agents work with default flags: bodies like those that Codex and Claude Code send."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from enginebay import LLM
from enginebay_server import chat, routes_anthropic, routes_responses
from enginebay_server.anthropic import MessagesBody
from enginebay_server.errors import ApiError
from enginebay_server.messages_in import as_messages
from enginebay_server.parsing.message import custom_input
from enginebay_server.response_items import input_messages
from enginebay_server.responses import ResponsesBody
from tests.pool import few_sizes
from tests.server.in_process_client import HELLO, Asker

HERE = Path(__file__).parent / "agents"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
LENGTH = 1024


def body_of(name: str) -> Any:
    return json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))


def codex(*, is_second: bool = False, **fields: Any) -> dict[str, Any]:
    """The body of a turn of Codex. The second goes on with what the model and the tools said."""
    body: dict[str, Any] = body_of("codex_first") | fields
    body["input"] += body_of("codex_second_items") if is_second else []
    return body


def claude(*, is_second: bool = False, **fields: Any) -> dict[str, Any]:
    """The body of a turn of Claude Code."""
    body: dict[str, Any] = body_of("claude_first") | fields
    body["messages"] += body_of("claude_second_messages") if is_second else []
    return body


@pytest.fixture(scope="module")
def agent() -> Iterator[Asker]:
    """A server with default flags, whose context holds the bodies."""
    with (
        few_sizes(),
        LLM("demo", max_model_len=LENGTH, max_num_seqs=1, max_num_batched_tokens=512) as llm,
    ):
        yield Asker(llm)


def named_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each under its name."""
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@pytest.mark.parametrize("is_second", [False, True])
def test_codex_is_served_with_default_flags(agent: Asker, is_second: bool) -> None:
    answer = agent.post(RESPONSES, codex(is_second=is_second, max_output_tokens=4))
    assert answer.status_code == 200, answer.text
    events = named_events(answer.text)
    assert [events[0]["type"], events[-1]["type"]] == ["response.created", "response.incomplete"]
    ignored = answer.headers["x-enginebay-ignored"].split(", ")
    assert ignored == [
        "client_metadata",
        *(["input.web_search_call"] if is_second else []),
        "prompt_cache_key",
        "reasoning.summary",
        "service_tier",
        "stream_options.reasoning_summary_delivery",
        "text.verbosity",
        "tools.image_generation",
        "tools.tool_search",
        "tools.web_search",
    ]


@pytest.mark.parametrize("is_second", [False, True])
def test_claude_code_is_served_with_default_flags(agent: Asker, is_second: bool) -> None:
    path = f"{MESSAGES}?beta=true"
    answer = agent.post(path, claude(is_second=is_second, max_tokens=4))
    assert answer.status_code == 200, answer.text
    events = named_events(answer.text)
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    assert answer.headers["x-enginebay-ignored"].split(", ") == [
        "context_management",
        "metadata",
        "output_config.task_budget",
        "speed",
        "thinking",
        "tools.web_search_20250305",
    ]


def chat_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages for the chat template that a body of Codex becomes."""
    made = ResponsesBody(**body)
    return as_messages(made.as_chat(input_messages(made.items)).messages)


def test_all_system_texts_of_a_response_are_one_message_in_a_fixed_order() -> None:
    late = {"type": "message", "role": "system", "content": "The user is in a hurry."}
    body = codex()
    body["input"].append(late)
    system, *others = chat_of(body)
    assert system == {
        "role": "system",
        "content": "You are a coding agent in a terminal. Work until the task is done.\n\n"
        "<permissions>Commands run in a sandbox.</permissions>\n\nThe user is in a hurry.",
    }
    assert [message["role"] for message in others] == ["user", "user"]


def test_all_system_texts_of_a_message_are_one_without_the_checksum_for_billing() -> None:
    made = MessagesBody(**claude(is_second=True))
    system, *others = as_messages(made.chat.messages)
    text = "You are a coding agent.\nUse tools to work on files.\n\nThe user watches."
    assert system == {"role": "system", "content": text}
    assert [message["role"] for message in others] == ["user", "assistant", "tool", "tool", "user"]
    assert others[3]["content"] == "Error: no such file"


def test_every_call_and_result_of_codex_reaches_the_conversation() -> None:
    _, _, _, answer, *rest = chat_of(codex(is_second=True))
    assert answer["content"] == "I read the file first."
    calls = [
        call["function"] for message in (answer, *rest) for call in message.get("tool_calls", ())
    ]
    assert calls[:2] == [
        {"name": "exec_command", "arguments": {"cmd": "cat notes.txt"}},
        {"name": "mcp__files__search", "arguments": {"word": "teh"}},
    ]
    assert calls[2]["name"] == "apply_patch"
    assert calls[2]["arguments"]["input"].startswith("*** Begin Patch\n")
    results = [message["content"] for message in rest if message["role"] == "tool"]
    assert results == ["Exit code: 0\nOutput:\nteh cat", "notes.txt", "Success."]


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the model write a text."""

    def write(text: str) -> None:
        for routes in (routes_responses, routes_anthropic):
            original = chat.chat_params

            def params(*args: Any, original: Any = original) -> Any:
                made = original(*args)
                return made.model_copy(update={"regex": re.escape(text), "temperature": 0.0})

            monkeypatch.setattr(routes, "chat_params", params)

    return write


PATCH = '*** Begin Patch\n-a "b"\n*** End Patch'


def called(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def test_a_custom_tool_is_called_with_its_text(agent: Asker, says: Callable[[str], None]) -> None:
    says(called("apply_patch", input=PATCH))
    body = codex(max_output_tokens=200, store=True)
    events = named_events(agent.post(RESPONSES, body).text)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    added, delta, done, item = (
        events[2]["item"], events[3], events[4], events[5]["item"],
    )  # fmt: skip
    assert (added["type"], added["input"]) == ("custom_tool_call", "")
    assert (delta["delta"], done["input"], item["input"]) == (PATCH, PATCH, PATCH)
    assert item["id"] == delta["item_id"] == done["item_id"]
    assert (item["type"], item["name"]) == ("custom_tool_call", "apply_patch")
    assert "arguments" not in item
    response = events[-1]["response"]
    assert response["output"] == [item]
    whole = agent.ok(RESPONSES, **{**body, "stream": False})["output"][0]
    assert (whole["type"], whole["input"]) == ("custom_tool_call", PATCH)
    # The turn after it goes on with what is stored, or with a reference to the item.
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Success."}
    says("Done.")
    stored = {"previous_response_id": response["id"], "input": [output]}
    one = agent.ok(RESPONSES, **{**body, **stored, "stream": False})
    reference = {"type": "item_reference", "id": item["id"]}
    again = {**body, "input": [*body["input"], reference, output], "stream": False}
    other = agent.ok(RESPONSES, **again)
    counts = [found["usage"]["input_tokens"] for found in (one, other)]
    assert counts[0] == counts[1] > response["usage"]["input_tokens"]


def test_a_reference_to_an_item_that_is_not_stored_is_an_error(agent: Asker) -> None:
    for named in (f"msg_{'0' * 32}0", "msg_1"):
        items = [{"type": "item_reference", "id": named}]
        error = agent.refused(RESPONSES, 404, input=items)
        assert (error["param"], error["code"]) == ("input.0", "item_not_found")


def test_a_tool_of_a_namespace_is_called_by_its_own_name(
    agent: Asker, says: Callable[[str], None]
) -> None:
    says(called("mcp__files__search", word="teh"))
    [item] = agent.ok(RESPONSES, **codex(stream=False, max_output_tokens=60))["output"]
    assert (item["type"], item["namespace"], item["name"]) == (
        "function_call",
        "mcp__files__",
        "search",
    )
    assert json.loads(item["arguments"]) == {"word": "teh"}


def test_claude_code_gets_the_use_of_a_tool(agent: Asker, says: Callable[[str], None]) -> None:
    says(called("Bash", command="ls"))
    events = named_events(agent.post(MESSAGES, claude(max_tokens=60)).text)
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    block = events[1]["content_block"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "Bash", {})
    assert json.loads(events[2]["delta"]["partial_json"]) == {"command": "ls"}
    assert events[4]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "web_search"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
    ],
)
def test_a_choice_that_demands_a_tool_of_the_server_is_refused(agent: Asker, choice: Any) -> None:
    tools = [{"type": "web_search"}]
    error = agent.refused(RESPONSES, 400, input="a", tools=tools, tool_choice=choice)
    assert error["param"] == "tool_choice"
    assert "tools.web_search" in error["message"]
    for allowed in ("auto", "none"):
        agent.ok(RESPONSES, input="a", tools=tools, tool_choice=allowed, max_output_tokens=1)


def test_a_demanded_tool_of_anthropic_is_refused(agent: Asker) -> None:
    choice = {"type": "tool", "name": "web_search"}
    answer = agent.post(MESSAGES, claude(tool_choice=choice))
    assert answer.status_code == 400
    assert "web_search_20250305" in answer.json()["error"]["message"]


def test_allowed_tools_are_the_only_ones_in_the_prompt() -> None:
    allowed = [{"type": "custom", "name": "apply_patch"}, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    use = ResponsesBody(**codex(tool_choice=choice)).as_chat(HELLO).tool_use
    assert use.mode == "required"
    assert [one["function"]["name"] for one in use.described] == ["apply_patch"]
    wrong = {**choice, "tools": [{"type": "function", "name": "nothing"}]}
    with pytest.raises(ApiError, match="nothing"):
        _ = ResponsesBody(**codex(tool_choice=wrong)).as_chat(HELLO).tool_use


def test_a_grammar_of_a_custom_tool_is_described() -> None:
    [tool] = [
        one for one in ResponsesBody(**codex()).as_chat(HELLO).tool_use.functions
        if one["name"] == "apply_patch"
    ]  # fmt: skip
    described = tool["parameters"]["properties"]["input"]["description"]
    assert 'lark grammar:\nstart: "*** Begin Patch"' in described


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\n\\"b"}', 'a\n"b'),
        ('{"patch": "a"}', "a"),
        ('{"input": 3}', '{"input": 3}'),
        ('{"a": "b", "c": "d"}', '{"a": "b", "c": "d"}'),
        ('{"input": "a\\nb\\u00', "a\nb"),
        ('{"inp', ""),
    ],
)
def test_the_text_of_a_custom_tool_is_found_in_its_arguments(arguments: str, text: str) -> None:
    assert custom_input(arguments) == text


def test_ignored_fields_are_counted_without_labels_of_clients(agent: Asker) -> None:
    lenient = Asker(agent.llm, unknown_fields="ignore")
    lenient.post(RESPONSES, codex(max_output_tokens=1))
    lenient.post(RESPONSES, {"input": "a", "max_output_tokens": 1, "mine": 1})
    found = dict(
        line.rsplit(" ", 1)
        for line in lenient.get("/metrics").text.splitlines()
        if line.startswith("enginebay:ignored_fields_total") and RESPONSES in line
    )
    fields = {re.findall('field="([^"]*)"', line)[0]: value for line, value in found.items()}
    assert fields["tools"] == fields["client_metadata"] == fields["other"] == "1.0"
    assert not any("mine" in line for line in found)


def test_tools_are_described_to_a_model_without_a_place_for_them(agent: Asker) -> None:
    seen: list[str] = []
    submit = agent.llm.submit

    def submitted(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(agent.llm.tokenizer.decode(prompt, skip_special_tokens=False))
        return submit(prompt, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent.llm, "submit", submitted)
        agent.post(RESPONSES, codex(is_second=True, max_output_tokens=1))
        agent.ok("/v1/chat/completions", messages=HELLO, max_tokens=1)
    turn, plain = seen
    system, *rest = turn.split("<|im_start|>")[1:]
    assert "You can call tools." in system
    assert '{"name":"exec_command","description":"Runs a command in a shell."' in system
    assert "web_search" not in turn
    roles = [one.partition("\n")[0] for one in rest]
    assert roles == ["user", "user", *["assistant", "user"] * 3, "assistant"]
    assert '{"name": "exec_command", "arguments": {"cmd": "cat notes.txt"}}' in rest[2]
    assert "Result of exec_command:\nExit code: 0" in rest[3]
    assert "tools" not in plain


def test_tool_prompt_none_refuses_tools_that_the_model_would_not_see(agent: Asker) -> None:
    bare = Asker(agent.llm, {"tool_prompt": "none"})
    error = bare.refused(RESPONSES, 400, **codex())
    assert error["param"] == "tools"
    assert "--tool-prompt auto" in error["message"]
