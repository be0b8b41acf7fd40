"""Parsers of generated text find reasoning and tool calls, lose no text, and do not depend on how
the text is cut into pieces.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enginebay.contracts.output_format import (
    ContentDelta,
    ModelChat,
    OutputFormat,
    ParseRequest,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallStart,
)
from enginebay_server.parsing.json_calls import bare_json, hermes, llama3, mistral
from enginebay_server.parsing.message import MessageParser
from enginebay_server.parsing.template import template
from enginebay_server.parsing.thinking import think
from enginebay_server.parsing.xml_calls import qwen3_coder
from enginebay_testing.output_parses import joined, parsed
from enginebay_testing.output_texts import REQUEST, RESPONSE_TEMPLATE, TOOLS

NUMBERS = {"properties": {"n": {"type": ["integer", "null"]}, "text": {"type": "string"}}}
ASKED = dataclasses.replace(REQUEST, tools=[*TOOLS, {"name": "set", "parameters": NUMBERS}])
C, R, S, A = ContentDelta, ReasoningDelta, ToolCallStart, ToolArgumentsDelta
Found = list[tuple[Any, ...]]


def call(index: int, name: str, arguments: dict[str, Any]) -> Found:
    return [(S, index, name), (A, index, json.dumps(arguments))]


def content(text: str) -> tuple[str, Found]:
    """A text that is content as it stands, and what it is parsed to."""
    return text, [(C, None, text)]


WEATHER, PARIS = '{"name": "get_weather", "arguments": {"city": "Paris"}}', {"city": "Paris"}
SET = (
    "<function=set>\n<parameter=n>\n3\n</parameter>\n<parameter=text>\n5\n</parameter>x\n"
    "</parameter>\n</function>"
)
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
    # separators of calls are content when no call follows
    (
        llama3,
        f"{WEATHER}; that, {{then}}",
        [*call(0, "get_weather", PARIS), (C, None, "; that, {then}")],
    ),
    (
        llama3,
        f'{WEATHER}; {{"name": "now", "parameters": {{"a": }}}}',
        [
            *call(0, "get_weather", PARIS),
            (C, None, '; {"name": "now", "parameters": {"a": }}'),
        ],
    ),
    (
        llama3,
        f"{WEATHER}, <|python_tag|> and so on",
        [*call(0, "get_weather", PARIS), (C, None, ", <|python_tag|> and so on")],
    ),
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
    (
        qwen3_coder,
        f"Ok.\n<tool_call>\n{SET}\n</tool_call>\nDone.",
        [
            (C, None, "Ok."),
            *call(0, "set", {"n": 3, "text": "5\n</parameter>x"}),
            (C, None, "Done."),
        ],
    ),
    (qwen3_coder, "<function=now></function></tool_c", call(0, "now", {})),
    (
        qwen3_coder,
        "<tool_call><function=now></function></tool_call><tool_call><function=now></function>",
        [*call(0, "now", {}), *call(1, "now", {})],
    ),
    (qwen3_coder, *content("<tool_call>\n<function=now>\n<parameter=a>\n1\n</parame")),
    (qwen3_coder, *content("a <tool_call> b <function=> c")),
    (
        qwen3_coder,
        "<function=<function=now></function>",
        [(C, None, "<function="), *call(0, "now", {})],
    ),
    (think, "<think>\nHm.\n</think>\n\nYes.", [(R, None, "Hm."), (C, None, "Yes.")]),
    (think, "Yes <think>no</think>", [(C, None, "Yes <think>no</think>")]),
    (think, "<think>cut off</thi", [(R, None, "cut off</thi")]),
    (think, "  <thin", [(C, None, "  <thin")]),
    (
        template,
        f"<think>\nHm.\n</think>\nYes.\n<tool_call>{WEATHER}</tool_call>",
        [(R, None, "Hm."), (C, None, "Yes."), *call(0, "get_weather", PARIS)],
    ),
    (template, *content("<tool_call>{oops}</tool_call>")),
    (template, *content(f"Hm. <tool_call>\n{WEATHER[:30]}")),
    (template, *content("\n Two words,\n\n\nand a line. \n")),
]  # fmt: skip


@pytest.mark.parametrize(("output_format", "text", "expected"), CASES)
def test_text_is_parsed_in_one_piece_and_by_characters(
    output_format: OutputFormat, text: str, expected: Found
) -> None:
    for pieces in ([text], text):
        assert joined(parsed(output_format.make_parser(ASKED), pieces)) == expected


PIECES = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"),
    *("<function=now>", "</function>", "<parameter=a>", "</parameter>"),
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
    "qwen3_coder": qwen3_coder,
}
CHEAP = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)


def visible(text: str) -> str:
    """A text without white space, marks and what belongs to calls."""
    marks = r"</?tool_call>|\[TOOL_CALLS\]|\[ARGS\]|\[CALL_ID\]|<\|python_tag\|>|</?think>"
    marks += r"|<(function|parameter)=[^<>\n]*>?|</(function|parameter)>"
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


def test_an_id_that_a_model_writes_twice_is_given_to_one_call() -> None:
    text = "[TOOL_CALLS]now[CALL_ID]abcdef123[ARGS]{}" * 2
    deltas = parsed(mistral.make_parser(REQUEST), text)
    first, second = [delta.id for delta in deltas if isinstance(delta, ToolCallStart)]
    assert first == "abcdef123"
    assert re.fullmatch("[a-zA-Z0-9]{9}", second)
    assert second != first


def declared(tool_calls: dict[str, Any], **others: Any) -> ParseRequest:
    """A request to a model that declares its tool calls, and other regions."""
    fields = {"tool_calls": {"repeats": True, **tool_calls}, **others}
    return ParseRequest(ModelChat("", {"start_anchor": "<a>", "fields": fields}), TOOLS)


PYTHON_CALLS = {
    "open": "<call>",
    "close": "</call>",
    "content": "python-call-list",
    "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}},
    "transform_each": True,
}
TAGGED_CALLS = {
    "open_pattern": r"<call (?P<name>\w+)>",
    "close": "</call>",
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</(?P=key)>"},
    "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
}


@pytest.mark.parametrize(
    ("calls", "text", "expected"),
    [
        # the library refuses the second call; the others are found, however the text is cut
        (
            PYTHON_CALLS,
            "A. <call>[now()]</call> B. <call>[oops</call> C. <call>[now(a=1)]</call>",
            [
                (C, None, "A."),
                *call(0, "now", {}),
                (C, None, "B. <call>[oops</call> C."),
                *call(1, "now", {"a": 1}),
            ],
        ),
        (PYTHON_CALLS, *content("<call>[now()")),
        (PYTHON_CALLS, *content("<call>[now()]</ca")),
        (TAGGED_CALLS, "<call now><a>b</a></call>", call(0, "now", {"a": "b"})),
        # a call that is cut off has lost arguments
        (TAGGED_CALLS, *content("Hm. <call now><a>b</a><c>d")),
    ],
)
def test_calls_of_a_declaration_are_whole_or_content_with_marks(
    calls: dict[str, Any], text: str, expected: Found
) -> None:
    for pieces in ([text], text):
        parser = template.make_parser(declared(calls, content={}))
        assert joined(parsed(parser, pieces)) == expected


def test_text_without_marks_is_content_where_a_declaration_has_no_region_for_it() -> None:
    request = declared(PYTHON_CALLS, content={"open": "<say>", "close": "</say>"})
    for text in ("Hello,\n\nyou. ", "<sa"):
        assert joined(parsed(template.make_parser(request), text)) == content(text)[1]
    found = joined(parsed(template.make_parser(request), "<say>Hello.</say><call>[now()]</call>"))
    assert found == [(C, None, "Hello."), *call(0, "now", {})]
