"""Formats of output are chosen by name or by the chat template; demanded calls follow a schema; the
suite of formats finds faults.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jsonschema
import pytest

from enginebay.contracts.output_format import (
    ContentDelta,
    Example,
    ExampleCall,
    ModelChat,
    OutputFormat,
    Parser,
    Piece,
    ToolArgumentsDelta,
    ToolCallStart,
)
from enginebay.errors import PluginError, UnknownNameError
from enginebay.plugins.hooks import Declaration
from enginebay.plugins.registry import Entry, Registry, load_registry
from enginebay_server.parsing.choose import choose_formats, model_chat
from enginebay_server.parsing.constrained import (
    CallListParser,
    NamedCallParser,
    arguments_schema,
    calls_schema,
)
from enginebay_server.parsing.json_calls import bare_json, hermes, llama3, mistral
from enginebay_server.parsing.template import template
from enginebay_server.parsing.thinking import think
from enginebay_server.parsing.xml_calls import qwen3_coder
from enginebay_testing.output_formats import it_reads_what_is_declared, output_format_checks
from enginebay_testing.output_parses import joined, parsed
from enginebay_testing.output_texts import RESPONSE_TEMPLATE, splits
from tests.zoo.formats import FAULTS, RIGHT

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
        ('[{"name":"f","argum', []),
        ("[", []),
        ('[{"name":"a{b\\', []),
        ('[{"name":"f","arguments":{}}', [(S, 0, "f"), (A, 0, "{}")]),
        ('[{"name":"f","arguments":{}},{"n', [(S, 0, "f"), (A, 0, "{}")]),
        ('[{"name":"f","arguments":{}}, {"name": "f", "arguments": ', [(S, 0, "f"), (A, 0, "{}")]),
        ("No call.", [(C, None, "No call.")]),
        ('[{"name":"f"} No', [(C, None, '[{"name":"f"} No')]),
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
    with pytest.raises(UnknownNameError, match="Allowed: hermes, json"):
        choose_formats(registry, chat, tools="think")
    with pytest.raises(UnknownNameError, match="Allowed: think"):
        choose_formats(registry, chat, reasoning="template")


def test_a_declaration_that_reads_something_else_than_the_examples_is_found() -> None:
    it_reads_what_is_declared(template, ("reasoning", "tool_calls"))
    with pytest.raises(AssertionError, match=r"declaration reads reasoning, .* show tool_calls"):
        it_reads_what_is_declared(hermes, ("reasoning",))


class Shouting(Parser):
    """Calls are words in capitals."""

    def feed(self, text: str) -> list[Any]:
        return [ContentDelta(text.lower())] if text else []

    def finish(self) -> list[Any]:
        return []


shouting = OutputFormat(lambda _: Shouting(), lambda chat: "SHOUT" in chat.chat_template)


def test_a_plugins_parser_is_chosen_like_ours(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entry(name: str, target: object, priority: int) -> Entry:
        monkeypatch.setitem(__import__("sys").modules, name, type("M", (), {"it": target}))
        declared = Declaration(
            "format",
            name,
            f"{name}:it",
            capabilities={"priority": priority, "reads": ("tool_calls",)},
        )
        return Entry("format", name, "external", "1", "external", declaration=declared)

    both = Registry([*registry.entries, entry("shouting", shouting, 50), entry("wrong", 3, 99)])
    chat = ModelChat("SHOUT <tool_call>")
    assert choose_formats(both, chat).tools is shouting
    assert choose_formats(both, ModelChat("<tool_call>")).tools is hermes
    with pytest.raises(PluginError, match="OutputFormat"):
        choose_formats(both, chat, tools="wrong")


@pytest.mark.parametrize(
    ("fault", "check", "told"),
    [
        ("a parser, and no format", "it_is_an_output_format", "no OutputFormat"),
        ("no examples", "it_brings_examples", r"no examples.*OutputFormat\(examples="),
        ("declares reasoning", "it_brings_examples", "has_reasoning is True"),
        ("serves any model", "it_serves_chats_that_show_it", "for any model"),
        ("raises on NUL", "text_without_marks_is_content", "raised ValueError: embedded null"),
        ("raises on half of a pair", "text_without_marks_is_content", "raised UnicodeEncodeError"),
        ("raises on long text", "text_without_marks_is_content", "raised MemoryError"),
        ("collapses blank lines", "text_without_marks_is_content", "was parsed to"),
        ("strips content", "text_that_is_cut_anywhere_can_be_finished", "'Two ' was parsed to"),
        ("finds no call", "examples_are_parsed_as_they_say", "and should be"),
        ("ignores the prompt", "examples_are_parsed_as_they_say", "and should be"),
        ("one id for all calls", "examples_are_parsed_as_they_say", "share an id"),
        ("drops text before calls", "text_around_an_example_is_kept", "and not to"),
        ("drops text after calls", "text_around_an_example_is_kept", "and not to"),
        ("finds quoted calls", "text_around_an_example_is_kept", "and not to"),
        ("finds reasoning in the answer", "text_around_an_example_is_kept", "and not to"),
        ("drops text between calls", "an_example_may_come_twice", "and not to"),
        ("finds one call", "an_example_may_come_twice", "and not to"),
        ("drops calls of unknown tools", "calls_of_unknown_tools_lose_no_text", "and not to"),
        ("sorts keys", "arguments_keep_their_values", "and not to"),
        ("halves of pairs in arguments", "arguments_keep_their_values", "cannot be sent as UTF-8"),
        ("arguments that are not JSON", "a_call_that_is_no_json_is_content", "no JSON object"),
        ("empties bad calls", "a_call_that_is_no_json_is_content", "and not to"),
        ("drops the marks of bad calls", "a_call_that_is_no_json_is_content", "and not to"),
        ("drops parts of marks in reasoning", "reasoning_may_be_any_text", "and not to"),
        ("drops incomplete calls", "text_that_is_cut_anywhere_can_be_finished", "and not to"),
        ("repairs incomplete calls", "text_that_is_cut_anywhere_can_be_finished", "and not to"),
        ("sends incomplete arguments", "text_that_is_cut_anywhere_can_be_finished", "no JSON"),
        ("drops reasoning cut off", "text_that_is_cut_anywhere_can_be_finished", "and not to"),
        ("each piece alone", "any_split_gives_the_same_parse", "in the pieces"),
        ("numbers calls by piece", "any_split_gives_the_same_parse", "in the pieces"),
        ("an empty piece ends the text", "any_split_gives_the_same_parse", "in the pieces"),
        ("parsers share their state", "parsers_do_not_know_of_each_other", "by turns"),
    ],
)
def test_the_suite_finds_a_faulty_format(fault: str, check: str, told: str) -> None:
    checks = dict(output_format_checks(FAULTS[fault]))
    with pytest.raises(AssertionError, match=told):
        checks[check]()


@pytest.mark.parametrize("name", ["lines", "brackets", "no opening mark"])
def test_the_suite_accepts_a_right_format(name: str) -> None:
    for check_name, check in output_format_checks(RIGHT[name]):
        try:
            check()
        except AssertionError as error:
            pytest.fail(f"{check_name}: {error}")


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("drops text between calls", "an_example_may_come_twice"),
        ("numbers calls by piece", "any_split_gives_the_same_parse"),
        ("ASCII in arguments", "arguments_keep_their_values"),
        ("finds reasoning in the answer", "text_around_an_example_is_kept"),
        ("reasoning cut off is the answer", "text_that_is_cut_anywhere_can_be_finished"),
    ],
)
def test_one_example_is_enough_to_find_a_fault(fault: str, check: str) -> None:
    poor = dataclasses.replace(FAULTS[fault], examples=FAULTS[fault].examples[:1])
    with pytest.raises(AssertionError):
        dict(output_format_checks(poor))[check]()


NOW = ExampleCall("now")


@pytest.mark.parametrize(
    ("examples", "told"),
    [
        ([()], "is no Example"),
        ([Example(())], "has no pieces"),
        ([Example(("now",))], "is no Piece"),  # type: ignore[arg-type]
        ([Example((Piece(""),))], "has no text"),
        ([Example((Piece("Hello."),))], "no example has a call or reasoning"),
        ([Example((Piece("now()", calls=[NOW]),))], "argument of letters alone"),
        ([Example((Piece("x", content="x", calls=[NOW]),))], "has two of"),
        ([Example((Piece("x", reasoning="y"),))], "the reasoning 'y' is not in the text"),
        ([Example((Piece("x", calls=[ExampleCall("x", "[1]")]),))], "no JSON object"),
    ],
)
def test_examples_that_say_too_little_are_refused(examples: list[Example], told: str) -> None:
    checks = dict(output_format_checks(dataclasses.replace(hermes, examples=examples)))
    with pytest.raises(AssertionError, match=told):
        checks["it_brings_examples"]()


def test_every_format_of_ours_has_several_examples(registry: Registry) -> None:
    entries = registry.ready("format")
    assert len(entries) >= 7
    for entry in entries:
        assert len(registry.load(entry).examples) >= 3, entry.name


def test_a_text_is_cut_in_all_pairs_of_places() -> None:
    pieces = [tuple(one) for one in splits("abcde", in_pairs=True)]
    assert {"".join(one) for one in pieces} == {"abcde"}
    assert tuple("abcde") in pieces
    assert ("ab", "c", "de") in pieces
    assert len({one for one in pieces if len(one) == 3 and all(one)}) == 6


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
