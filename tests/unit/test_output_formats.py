"""Formats of output are chosen by name or by the chat template; demanded calls follow a schema; the
suite of formats finds faults.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jsonschema
import pytest

from enginebay.errors import PluginError, UnknownNameError
from enginebay.hooks import Declaration
from enginebay.registry import Entry, Registry, load_registry
from enginebay_server.parsing.choose import choose_formats, model_chat
from enginebay_server.parsing.constrained import (
    CallListParser,
    NamedCallParser,
    arguments_schema,
    calls_schema,
)
from enginebay_server.parsing.contract import (
    ContentDelta,
    ModelChat,
    OutputFormat,
    Parser,
    ToolArgumentsDelta,
    ToolCallStart,
)
from enginebay_server.parsing.json_calls import bare_json, hermes, llama3, mistral
from enginebay_server.parsing.template import template
from enginebay_server.parsing.thinking import think
from enginebay_server.parsing.xml_calls import qwen3_coder
from enginebay_testing.output_formats import (
    REQUEST,
    RESPONSE_TEMPLATE,
    joined,
    output_format_checks,
    parsed,
)

C, S, A = ContentDelta, ToolCallStart, ToolArgumentsDelta
Found = list[tuple[Any, ...]]

RECURSIVE = {
    "name": "tree",
    "parameters": {
        "properties": {"root": {"$ref": "#/$defs/node"}},
        "$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}},
    },
}


def test_the_schema_of_demanded_calls_holds_each_tool_to_its_own_parameters() -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"name": "get_weather", "parameters": city}, {"name": "now"}, RECURSIVE]
    check = jsonschema.Draft202012Validator(calls_schema(tools, several=True)).is_valid
    weather = {"name": "get_weather", "arguments": {"city": "Paris"}}
    tree = {"name": "tree", "arguments": {"root": {"next": {"next": {}}}}}
    assert check([weather, {"name": "now", "arguments": {}}, tree])
    assert not check([])
    assert not check([{"name": "get_weather", "arguments": {}}])
    assert not check([{"name": "now", "arguments": {"a": 1}}])
    assert not check([{"name": "other", "arguments": {}}])
    one = jsonschema.Draft202012Validator(calls_schema(tools, several=False)).is_valid
    assert one([weather])
    assert not one([weather, weather])
    assert arguments_schema({"name": "now"})["additionalProperties"] is False


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '[{"name":"now","arguments":{}},{"name":"f","arguments":{"a":{"b":"}"}}}]',
            [(S, 0, "now"), (A, 0, "{}"), (S, 1, "f"), (A, 1, '{"a":{"b":"}"}}')],
        ),
        ('[{"name":"f","arguments":{"a":"cut o', [(S, 0, "f"), (A, 0, '{"a":"cut o')]),
        ('[{"name":"f","argum', [(C, None, '[{"name":"f","argum')]),
        ("[", [(C, None, "[")]),
        ('[{"name":"f","arguments":{}}', [(S, 0, "f"), (A, 0, "{}")]),
    ],
)
def test_demanded_calls_are_given_out_as_they_come(text: str, expected: Found) -> None:
    for pieces in ([text], text):
        assert joined(parsed(CallListParser(), pieces)) == expected


def test_arguments_of_a_named_call_are_given_out_as_they_come() -> None:
    parser = NamedCallParser("f")
    assert parser.feed("") == []
    start, first = parser.feed('{"a"')
    assert (start.name, first) == ("f", ToolArgumentsDelta(0, '{"a"'))  # type: ignore[union-attr]
    assert parser.feed(": 1}") == [ToolArgumentsDelta(0, ": 1}")]
    assert parser.finish() == []


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry()


@pytest.mark.parametrize(
    ("chat", "tools", "reasoning"),
    [
        (ModelChat("{% if tools %}<tool_call>"), hermes, None),
        (ModelChat("{% if tools %}<tool_call> <think></think>"), hermes, think),
        (ModelChat("[AVAILABLE_TOOLS] tools [TOOL_CALLS]"), mistral, None),
        (ModelChat("tools <|python_tag|>"), llama3, None),
        (ModelChat("tools <tool_call> <function= <parameter="), qwen3_coder, None),
        (ModelChat("{{ tools }}"), bare_json, None),
        (ModelChat("{{ messages }}"), None, None),
        (ModelChat("<tool_call></think>", RESPONSE_TEMPLATE), template, None),
        (ModelChat("<tool_call>", {"fields": 3}), hermes, None),
    ],
)
def test_auto_takes_what_the_chat_template_shows(
    registry: Registry, chat: ModelChat, tools: object, reasoning: object
) -> None:
    found = choose_formats(registry, chat)
    assert (found.tools, found.reasoning) == (tools, reasoning)
    keeps = found.tools is not None and found.tools.keeps_special_tokens
    assert keeps is (tools in (mistral, template))


def test_a_name_wins_over_the_chat_template_and_none_means_none(registry: Registry) -> None:
    chat = ModelChat("<tool_call></think>")
    found = choose_formats(registry, chat, tools="json", reasoning="none")
    assert (found.tools, found.reasoning) == (bare_json, None)
    assert (found.tool_choice.name, found.reasoning_choice.name) == ("json", "none")
    assert not choose_formats(registry, ModelChat(), tools="none").lacks_tools
    assert choose_formats(registry, ModelChat()).lacks_tools
    with pytest.raises(UnknownNameError, match="hermes"):
        choose_formats(registry, chat, tools="hermess")


class Shouting(Parser):
    """Calls are words in capitals."""

    def feed(self, text: str) -> list[Any]:
        return [ContentDelta(text.lower())] if text else []

    def finish(self) -> list[Any]:
        return []


shouting = OutputFormat(lambda _: Shouting(), lambda chat: "SHOUT" in chat.chat_template)


def test_a_strangers_parser_is_chosen_like_ours(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entry(name: str, target: object, priority: int) -> Entry:
        monkeypatch.setitem(__import__("sys").modules, name, type("M", (), {"it": target}))
        declared = Declaration(
            "tool_parser", name, f"{name}:it", capabilities={"priority": priority}
        )
        return Entry("tool_parser", name, "stranger", "1", "stranger", declaration=declared)

    both = Registry([*registry.entries, entry("shouting", shouting, 50), entry("wrong", 3, 99)])
    chat = ModelChat("SHOUT <tool_call>")
    assert choose_formats(both, chat).tools is shouting
    assert choose_formats(both, ModelChat("<tool_call>")).tools is hermes
    with pytest.raises(PluginError, match="OutputFormat"):
        choose_formats(both, chat, tools="wrong")


class Faulty(Parser):
    """A parser of Hermes' format with one fault."""

    def __init__(self, fault: str) -> None:
        self._fault, self._inner = fault, hermes.make_parser(REQUEST)

    def feed(self, text: str) -> list[Any]:
        if self._fault == "by piece":  # each piece is parsed alone
            return parsed(hermes.make_parser(REQUEST), [text])
        if self._fault == "refuses" and "Well" in text:
            raise ValueError("a text that this parser does not expect")
        return self._changed(self._inner.feed(text))

    def finish(self) -> list[Any]:
        return [] if self._fault in ("drops", "by piece") else self._changed(self._inner.finish())

    def _changed(self, deltas: list[Any]) -> list[Any]:
        for place, delta in enumerate(deltas):
            if isinstance(delta, ToolCallStart) and self._fault == "counts from 1":
                deltas[place] = dataclasses.replace(delta, index=delta.index + 1)
            if isinstance(delta, ToolArgumentsDelta) and self._fault == "no object":
                deltas[place] = dataclasses.replace(delta, text=f"[{delta.text}]")
            if isinstance(delta, ContentDelta) and self._fault == "strips":
                deltas[place] = ContentDelta(delta.text.replace("\n", ""))
        return deltas


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("by piece", "any_split_gives_the_same_parse"),
        ("drops", "text_that_is_cut_anywhere_can_be_finished"),
        ("strips", "text_without_marks_is_content"),
        ("counts from 1", "calls_are_numbered_and_have_objects_for_arguments"),
        ("no object", "calls_are_numbered_and_have_objects_for_arguments"),
        ("refuses", "text_that_is_cut_anywhere_can_be_finished"),
    ],
)
def test_the_suite_finds_a_faulty_format(fault: str, check: str) -> None:
    faulty = OutputFormat(lambda _: Faulty(fault), lambda _: False)
    checks = dict(output_format_checks(faulty))
    with pytest.raises((AssertionError, ValueError)):
        checks[check]()
    for right in dict(output_format_checks(hermes)).values():
        right()


@pytest.mark.parametrize(
    ("own", "given_template", "expected"),
    [
        ("own", None, "own"),
        ("own", "given", "given"),
        ({"default": "d", "tool_use": "t"}, None, "t"),
        (None, None, ""),
    ],
)
def test_the_chat_template_of_a_tokenizer_is_found(
    own: object, given_template: str | None, expected: str
) -> None:
    tokenizer = type("T", (), {"chat_template": own, "response_template": None})()
    assert model_chat(tokenizer, given_template) == ModelChat(expected)
