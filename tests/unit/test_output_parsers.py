"""Parsers of generated text find reasoning and tool calls, lose no text, and do not depend on how
the text is cut into pieces.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enginebay.errors import PluginError, UnknownNameError
from enginebay.hooks import Declaration
from enginebay.registry import Entry, Registry, load_registry
from enginebay_server.parsing.choose import OutputFormats, choose_formats, model_chat
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
    ParseRequest,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallStart,
)
from enginebay_server.parsing.json_calls import bare_json, hermes, llama3, mistral
from enginebay_server.parsing.message import MessageParser
from enginebay_server.parsing.template import template
from enginebay_server.parsing.thinking import think
from enginebay_testing.output_formats import (
    REQUEST,
    RESPONSE_TEMPLATE,
    joined,
    output_format_checks,
    parsed,
)

C, R, S, A = ContentDelta, ReasoningDelta, ToolCallStart, ToolArgumentsDelta
Found = list[tuple[Any, ...]]


def call(index: int, name: str, arguments: dict[str, Any]) -> Found:
    return [(S, index, name), (A, index, json.dumps(arguments))]


def content(text: str) -> tuple[str, Found]:
    """A text that is content as it stands, and what it is parsed to."""
    return text, [(C, None, text)]


WEATHER, PARIS = '{"name": "get_weather", "arguments": {"city": "Paris"}}', {"city": "Paris"}
CASES: list[tuple[OutputFormat, str, Found]] = [
    (
        hermes,
        f"Sure.\n<tool_call>\n{WEATHER}\n</tool_call>",
        [(C, None, "Sure."), *call(0, "get_weather", PARIS)],
    ),
    (
        hermes,
        f'<tool_call>{WEATHER}</tool_call>\n<tool_call>{{"name":"now"}}</tool_call>\nDone.',
        [*call(0, "get_weather", PARIS), *call(1, "now", {}), (C, None, "Done.")],
    ),
    # what is no call is content, and a later call is found
    (
        hermes,
        f"<tool_call>{{oops}}</tool_call> <tool_call>{WEATHER}</tool_call>",
        [(C, None, "<tool_call>{oops}</tool_call>"), *call(0, "get_weather", PARIS)],
    ),
    (hermes, *content('<tool_call>{"name": 1}</tool_call>')),
    (
        hermes,
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        [(C, None, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>')],
    ),
    # marks and brackets within strings
    (
        hermes,
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>}\\""}}</tool_call>',
        call(0, "f", {"a": '</tool_call>}"'}),
    ),
    # cut off: by a stop text, or by max_tokens
    (hermes, f"Hm. <tool_call>{WEATHER[:30]}", [(C, None, f"Hm. <tool_call>{WEATHER[:30]}")]),
    (hermes, f"<tool_call>{WEATHER}", call(0, "get_weather", PARIS)),
    (hermes, f"<tool_call>{WEATHER}</tool_", call(0, "get_weather", PARIS)),
    (hermes, "a < b <tool_ca", [(C, None, "a < b <tool_ca")]),
    (
        llama3,
        '<|python_tag|>{"name": "other", "parameters": {"a": 1}}; {"name": "now"}',
        [*call(0, "other", {"a": 1}), *call(1, "now", {})],
    ),
    (llama3, '{"name": "now", "parameters": {}}', call(0, "now", {})),
    (llama3, *content('{"name": "other", "parameters": {}}')),
    (
        llama3,
        f"Wait. <|python_tag|>{WEATHER}",
        [(C, None, "Wait."), *call(0, "get_weather", PARIS)],
    ),
    (
        mistral,
        f'[TOOL_CALLS] [{WEATHER}, {{"name": "now", "arguments": {{}}}}]',
        [*call(0, "get_weather", PARIS), *call(1, "now", {})],
    ),
    (
        mistral,
        'Yes.[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}',
        [(C, None, "Yes."), *call(0, "get_weather", PARIS), *call(1, "now", {})],
    ),
    (mistral, "[TOOL_CALLS] no call, sorry", [(C, None, "[TOOL_CALLS] no call, sorry")]),
    (mistral, '[TOOL_CALLS]now[ARGS]{"a": }', [(C, None, '[TOOL_CALLS]now[ARGS]{"a": }')]),
    (bare_json, f"[{WEATHER}]", call(0, "get_weather", PARIS)),
    (
        bare_json,
        '{"type": "function", "function": {"name": "now", "arguments": "{\\"a\\": 1}"}}',
        call(0, "now", {"a": 1}),
    ),
    (bare_json, f"The call is {WEATHER}", [(C, None, f"The call is {WEATHER}")]),
    (bare_json, '{"city": "Paris"}', [(C, None, '{"city": "Paris"}')]),
    (bare_json, *content('{"name": "now", "arguments": {"x": NaN}}')),
    (bare_json, *content('{"name": "now", "arguments": {"x": 1e999}}')),
    (bare_json, *content("{" + "[" * 5000)),
    (think, "<think>\nHm.\n</think>\n\nYes.", [(R, None, "Hm."), (C, None, "Yes.")]),
    (think, "Yes <think>no</think>", [(C, None, "Yes <think>no</think>")]),
    (think, "<think>cut off</thi", [(R, None, "cut off</thi")]),
    (think, "  <thin", [(C, None, "  <thin")]),
    (
        template,
        f"<think>\nHm.\n</think>\nYes.\n<tool_call>{WEATHER}</tool_call>",
        [(R, None, "Hm."), (C, None, "Yes."), *call(0, "get_weather", PARIS)],
    ),
    (template, "<tool_call>{oops}</tool_call>", [(C, None, "{oops}")]),
]  # fmt: skip


@pytest.mark.parametrize(("output_format", "text", "expected"), CASES)
def test_text_is_parsed_in_one_piece_and_by_characters(
    output_format: OutputFormat, text: str, expected: Found
) -> None:
    for pieces in ([text], text):
        assert joined(parsed(output_format.make_parser(REQUEST), pieces)) == expected


PIECES = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"),
    *("<think>", "</think>", WEATHER, '{"name": "now"}', '{"a": "', '"}', "{", "}", "[", "]", "<"),
    *(" ", "\n", "now", ";", ",", "words", '"', "\\", "1", "\u00e9", "\ud83d\ude00"),
)
FORMATS = {
    "hermes": hermes,
    "llama3": llama3,
    "mistral": mistral,
    "json": bare_json,
    "think": think,
    "template": template,
}
CHEAP = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)


def visible(text: str) -> str:
    """A text without white space, marks and what belongs to calls."""
    marks = r"</?tool_call>|\[TOOL_CALLS\]|\[ARGS\]|\[CALL_ID\]|<\|python_tag\|>|</?think>"
    return re.sub(marks, "", "".join(text.split()))


@pytest.mark.parametrize("name", FORMATS)
@given(parts=st.lists(st.sampled_from(PIECES), max_size=12), cuts=st.lists(st.integers(0, 200)))
@CHEAP
def test_any_split_gives_the_same_parse_and_no_text_is_lost(
    name: str, parts: list[str], cuts: list[int]
) -> None:
    text = "".join(parts)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    whole = joined(parsed(FORMATS[name].make_parser(REQUEST), [text]))
    assert joined(parsed(FORMATS[name].make_parser(REQUEST), pieces)) == whole
    if not any(kind is S for kind, *_ in whole):
        said = "".join(one[2] for one in whole)
        assert visible(said) == visible(text)


@pytest.mark.parametrize(
    ("prompt_end", "text", "expected"),
    [
        ("<assistant><think>\n", "Hm.</think>Yes.", [(R, None, "Hm."), (C, None, "Yes.")]),
        ("<assistant><think>\n", "<think>Hm.</think>Yes.", [(R, None, "Hm."), (C, None, "Yes.")]),
        ("<think>\n\n</think>\n\n", "Yes.", [(C, None, "Yes.")]),
    ],
)
def test_reasoning_may_begin_in_the_prompt(prompt_end: str, text: str, expected: Found) -> None:
    request = ParseRequest(ModelChat(), prompt_end=lambda _: prompt_end)
    assert joined(parsed(think.make_parser(request), text)) == expected


def test_a_declared_template_sees_what_the_prompt_has_begun() -> None:
    chat = ModelChat("", RESPONSE_TEMPLATE)
    prompt = "<|im_start|>user\nHi<|im_end|><|im_start|>assistant\n<think>\n"
    request = ParseRequest(chat, prompt_end=lambda _: prompt)
    found = joined(parsed(template.make_parser(request), "Hm.\n</think>\n\nYes."))
    assert found == [(R, None, "Hm."), (C, None, "Yes.")]
    without = ParseRequest(chat, prompt_end=lambda _: "no anchor <think>")
    assert joined(parsed(template.make_parser(without), "Yes.")) == [(C, None, "Yes.")]


@pytest.mark.parametrize("several", [True, False])
def test_reasoning_comes_before_calls_and_several_calls_can_be_left_out(*, several: bool) -> None:
    text = f"<think>Hm.</think><tool_call>{WEATHER}</tool_call><tool_call>{WEATHER}</tool_call>"
    parser = MessageParser(think.make_parser(REQUEST), hermes.make_parser(REQUEST), several=several)
    second = call(1, "get_weather", PARIS) if several else []
    expected = [(R, None, "Hm."), *call(0, "get_weather", PARIS), *second]
    assert joined(parsed(parser, text)) == expected
    assert parser.num_calls == 1 + several


def test_ids_are_those_of_the_format() -> None:
    def ids(output_format: OutputFormat, text: str) -> list[str]:
        deltas = parsed(output_format.make_parser(REQUEST), text)
        return [delta.id for delta in deltas if isinstance(delta, ToolCallStart)]

    text = "[TOOL_CALLS]now{}[TOOL_CALLS]now[CALL_ID]abcdef123[ARGS]{}"
    made, given_id = ids(mistral, text)
    assert re.fullmatch("[a-zA-Z0-9]{9}", made)
    assert given_id == "abcdef123"
    [made] = ids(hermes, f"<tool_call>{WEATHER}</tool_call>")
    assert re.fullmatch("call_[0-9a-f]{24}", made)


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
    assert found.keep_special_tokens is (tools in (mistral, template))


def test_a_name_wins_over_the_chat_template_and_none_means_none(registry: Registry) -> None:
    chat = ModelChat("<tool_call></think>")
    found = choose_formats(registry, chat, tools="json", reasoning="none")
    assert found == OutputFormats(chat, bare_json, None)
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
