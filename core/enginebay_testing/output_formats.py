"""Conformance suite of the contract of output formats: however a text is cut into pieces, it is
parsed in the same way; nothing raises; calls are whole.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from enginebay_server.parsing.contract import (
    ContentDelta,
    Delta,
    ModelChat,
    OutputFormat,
    Parser,
    ParseRequest,
    ReasoningDelta,
    ToolCallStart,
)

TOOLS = ({"name": "get_weather", "parameters": {"type": "object"}}, {"name": "now"})
RESPONSE_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}
"""A declaration for formats that follow the model's."""

REQUEST = ParseRequest(ModelChat("", RESPONSE_TEMPLATE), TOOLS)
PLAIN = ("Hello!", "Two words,\nand a line. 1 < 2 > 0.", "caf\u00e9 \u4f60\u597d")
CALL = '{"name": "get_weather", "arguments": {"city": "Par\\"is}", "days": [1, 2]}}'
NOW = '{"name": "now", "parameters": {}}'
TEXTS = (
    *PLAIN,
    f"<tool_call>\n{CALL}\n</tool_call>",
    f"Let me look. <tool_call>{CALL}</tool_call>\n<tool_call>{NOW}</tool_call> Done.",
    f"<tool_call>{CALL[:40]}</tool_call> and <tool_call> text",
    f"<think>\nWell <b>.\n</think>\n\nYes. <tool_call>{NOW}</tool_call>",
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nX\n</parameter>\n</function>\n</tool_call>",
    "<function=now></function> <function=oops",
    f"[TOOL_CALLS][{CALL}, {NOW}]",
    'Hm. [TOOL_CALLS]get_weather[ARGS]{"city": "x"}[TOOL_CALLS]now{}',
    f"<|python_tag|>{CALL}; {NOW}",
    f"{CALL}{NOW}",
    '{"city": "Paris", "name": 3}',
    '[1, 2, {"name": "get_weather"',
)
"""Texts in the formats that come with enginebay, whole, broken and cut off."""


def output_format_checks(output_format: OutputFormat) -> list[tuple[str, Callable[[], None]]]:
    """Every check of the suite, by name."""
    checks: tuple[Callable[[OutputFormat], None], ...] = (
        it_is_an_output_format,
        any_split_gives_the_same_parse,
        text_without_marks_is_content,
        calls_are_numbered_and_have_objects_for_arguments,
        text_that_is_cut_anywhere_can_be_finished,
    )
    return [(check.__name__, functools.partial(check, output_format)) for check in checks]


def parsed(parser: Parser, pieces: Iterable[str]) -> list[Delta]:
    """All deltas of a text that comes in these pieces."""
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return [*deltas, *parser.finish()]


def joined(deltas: Iterable[Delta]) -> list[tuple[Any, ...]]:
    """Deltas with consecutive texts of one kind joined, and without the ids of calls."""
    found: list[tuple[Any, ...]] = []
    for delta in deltas:
        if isinstance(delta, ToolCallStart):
            found.append((ToolCallStart, delta.index, delta.name))
            continue
        place = None if isinstance(delta, (ContentDelta, ReasoningDelta)) else delta.index
        if found and found[-1][:2] == (type(delta), place):
            found[-1] = (type(delta), place, found[-1][2] + delta.text)
        else:
            found.append((type(delta), place, delta.text))
    return found


def splits(text: str) -> list[Sequence[str]]:
    """A text as a whole, by characters, and in pieces of random length."""
    rng = random.Random(text)
    cuts = [sorted(rng.sample(range(len(text)), min(6, len(text)))) for _ in range(6)]
    pieces = [[text[a:b] for a, b in zip([0, *c], [*c, len(text)], strict=True)] for c in cuts]
    return [[text], list(text), *pieces]


def it_is_an_output_format(output_format: object) -> None:
    """The target is of the contract's class."""
    assert isinstance(output_format, OutputFormat), f"{output_format!r} is no OutputFormat"


def any_split_gives_the_same_parse(output_format: OutputFormat) -> None:
    """The deltas of TEXTS, joined, are those of the whole text."""
    for text in TEXTS:
        whole, *others = [
            joined(parsed(output_format.make_parser(REQUEST), pieces)) for pieces in splits(text)
        ]
        for other in others:
            assert other == whole, f"{text!r} was parsed to {other} and to {whole}"


def text_without_marks_is_content(output_format: OutputFormat) -> None:
    """Plain texts are content."""
    for text in PLAIN:
        found = joined(parsed(output_format.make_parser(REQUEST), text))
        assert found == [(ContentDelta, None, text)], f"{text!r} was parsed to {found}"


def calls_are_numbered_and_have_objects_for_arguments(output_format: OutputFormat) -> None:
    """The calls in TEXTS are numbered from 0, and their arguments are JSON objects."""
    for text in TEXTS:
        found = joined(parsed(output_format.make_parser(REQUEST), [text]))
        starts = [index for kind, index, _ in found if kind is ToolCallStart]
        assert starts == list(range(len(starts))), f"the calls of {text!r} are numbered {starts}"
        for place, (kind, index, _) in enumerate(found):
            if kind is ToolCallStart:
                assert found[place + 1 : place + 2], f"a call without arguments: {text!r}"
                _, its_index, arguments = found[place + 1]
                assert its_index == index, f"the arguments of call {its_index} follow {index}"
                value = json.loads(arguments)
                assert isinstance(value, dict), f"arguments {value!r} in {text!r}"


def text_that_is_cut_anywhere_can_be_finished(output_format: OutputFormat) -> None:
    """A text that ends early is parsed without an error, and plain text stays content."""
    for text in TEXTS:
        for end in range(len(text)):
            deltas = joined(parsed(output_format.make_parser(REQUEST), [text[:end]]))
            if text in PLAIN:
                left = "".join(str(one[2]) for one in deltas if one[0] is ContentDelta)
                assert left.rstrip() == text[:end].rstrip(), f"{text[:end]!r} became {deltas}"
