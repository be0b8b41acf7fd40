"""Texts with which parsers of tool calls and reasoning are checked, and the request they answer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from enginebay.contracts.output_format import ModelChat, ParseRequest

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
LINES = (
    "Hello!",
    "Two words,\nand a line. 1 < 2 > 0.",
    "caf\u00e9 \u4f60\u597d e\u0301 \U0001f469\u200d\U0001f467",
    "One.\n\n\n\nTwo.\r\n\r\n\tThree,  four. \n",
    "; and, so\non: {x} is a set, [1] a list, 2 >> 1, <b> & &lt; %s \\n 'a' \"b\" `c` | <| </",
    "control \x00\x01\x07\x1b[0m\x7f\x85\u2028\u2029\ufeff\u200b\u00a0 characters",
    "half \ud800 of a pair \udfff",
)
"""Texts without marks, in which a careless parser may change something."""

LONG = "Many words, " * 600
PLAIN = (
    *LINES,
    "\n \n  white space around \n\n",
    " \n\t",
    "\n",
    '{"temperature": 21.5, "unit": "C"}',
    "```json\n{'a': [1, 2]}\n```\n",
    LONG,
)
"""Whole answers without marks."""

CALL = '{"name": "get_weather", "arguments": {"city": "Par\\"is}", "days": [1, 2]}}'
NOW = '{"name": "now", "parameters": {}}'
TEXTS = (
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
    "[" * 3000,
    '<tool_call>{"name": "now", "arguments": ' + '{"a": ' * 3000,
)
"""Texts in the formats that come with enginebay, whole, broken and cut off."""

JSON_STRINGS = (
    "cafe\u0301 caf\u00e9 \u4f60\u597d \U0001f600",
    'He said "no" \\ / \\n',
    "\n line \n\n\tline\x00\x1f\u2028",
    "}{][ }}} ]] ,; ```",
    "  two  spaces  ",
    "007",
    "null",
    "x" * 5000,
    "half of a pair \ud83d",
)
"""Values of arguments, which are written as JSON."""

WORDS = ("Zu\u0308rich  \u6771\u4eac \U0001f600 Ix", "a" * 3000)
"""Values of arguments that need no escapes in any format."""

OBJECTS = (
    '{"z": {"b": [{"y": {"c": 1}}, []], "a": {}}, "m": [[1], [[2]]], "a": ""}',
    '{"big": 9007199254740993, "half": -2.5, "yes": true, "no": false, "none": null, "": 0}',
    '{"\u00e9\u4f60": {"arguments": {"name": "now"}, "parameters": {}}, "name": "x", "type": 1}',
    '{"deep": ' + "[" * 40 + "]" * 40 + "}",
)
"""Arguments as JSON, with nested objects, and with keys in no order."""

NOT_OBJECTS = ('{"a": }', '{"a": NaN}', "[1]", '{"a": 1', '{"a": 1 "b": 2}')
"""Texts in the place of arguments that are not JSON objects."""

MODERATE = 60
"""The length of a text that is cut in all pairs of places."""
NUM_PLACES, NUM_PAIRS, NUM_RANDOM = 400, 250, 10


def splits(text: str, *, in_pairs: bool) -> Iterator[Sequence[str]]:
    """Yield a text as a whole, by characters, with empty pieces, cut in each place, with `in_pairs`
    in pairs of places, and in pieces of random length. Long texts are cut in some of the places.
    """
    yield [text]
    yield list(text)
    yield [piece for char in text for piece in ("", char)]
    rng = random.Random(text.encode("utf-8", "surrogatepass"))
    places = list(range(1, len(text)))
    ones = places if len(places) <= NUM_PLACES else rng.sample(places, NUM_RANDOM)
    yield from ([text[:at], text[at:]] for at in ones)
    pairs = [(a, b) for b in places for a in range(1, b)] if in_pairs else []
    if len(text) > MODERATE:
        pairs = rng.sample(pairs, min(NUM_PAIRS, len(pairs)))
    yield from ([text[:a], text[a:b], text[b:]] for a, b in pairs)
    for _ in range(NUM_RANDOM):
        cuts = sorted(rng.sample(places, min(6, len(places))))
        yield [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
