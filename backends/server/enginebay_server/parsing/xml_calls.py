"""Tool calls of Qwen3-Coder and Qwen 3.5: a tag for the function, and a tag per argument."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from enginebay.contracts.output_format import (
    ContentDelta,
    Delta,
    Example,
    ExampleCall,
    ModelChat,
    OutputFormat,
    Parser,
    ParseRequest,
    Piece,
)
from enginebay_server.parsing.calls import Call, CallWriter, arguments_of, is_name, loads
from enginebay_server.parsing.marks import TextBeforeMarks
from enginebay_server.parsing.schema_types import ALL, SchemaTypes, Types, types_of_value

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_OF_FUNCTION = "<function=", "</function>"
ARGUMENT, END_OF_ARGUMENT = "<parameter=", "</parameter>"
_NAME = re.compile(r"([^<>\n]{1,200})>")
_OPEN = re.compile(r"[^<>\n]{0,200}")
_WORDS: Mapping[str, bool | None] = {"True": True, "False": False, "None": None}
"""Words of Python: the models' chat templates write these values so, and so do the models."""


class XmlCallParser(Parser):
    """Returns a call when its function's tag is closed. A mark without a call is content."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._types = {str(tool["name"]): SchemaTypes(tool.get("parameters")) for tool in tools}
        self._writer = CallWriter()
        self._content = TextBeforeMarks((OPEN, FUNCTION))
        self._mark = ""
        """The mark before the call, with white space."""
        self._raw = ""
        self._at = 0
        """Index in `_raw` at which the next step begins; the text before it belongs to the call."""
        self._name = self._key = ""
        self._searched = 0
        """Index in `_raw` up to which there is no end of the argument."""
        self._arguments: dict[str, Any] = {}
        self._step: Callable[[], list[Delta] | None] = self._text

    def feed(self, text: str) -> list[Delta]:
        """Add a piece of text, and return the deltas that no later text can change."""
        self._raw += text
        deltas: list[Delta] = []
        while (more := self._step()) is not None:
            deltas += more
        return deltas

    def finish(self) -> list[Delta]:
        """Return the deltas of the text that was held back; an incomplete call is content."""
        deltas: list[Delta] = []
        while self._step != self._text:
            if self._step == self._after and CLOSE.startswith(self._raw.strip()):
                self._raw = ""
            deltas += self._give_up()
            deltas += self.feed("")
        held = self._content.finish()
        return [*deltas, ContentDelta(held)] if held else deltas

    # The steps return deltas, or None when they need more text. `_step` is the next one.

    def _text(self) -> list[Delta] | None:
        """Read content."""
        if not self._raw:
            return None
        text, mark = self._content.feed(self._raw)
        self._raw, self._at = "", 0
        if mark is not None:
            is_function = mark.text.endswith(FUNCTION)
            self._mark = mark.text.removesuffix(FUNCTION) if is_function else mark.text
            self._raw = FUNCTION + mark.rest if is_function else mark.rest
            self._step = self._function
        return [ContentDelta(text)] if text else []

    def _function(self) -> list[Delta] | None:
        """Read up to the name of the function."""
        found = self._named(FUNCTION)
        if found is None:
            return None
        if not is_name(found):
            return self._give_up()
        self._name, self._arguments, self._step = found, {}, self._argument
        return []

    def _argument(self) -> list[Delta] | None:
        """Read up to the name of an argument, or the end of the call."""
        rest = self._raw[self._at :].lstrip()
        if rest.startswith(END_OF_FUNCTION):
            return self._complete(rest[len(END_OF_FUNCTION) :])
        if END_OF_FUNCTION.startswith(rest):
            return None
        found = self._named(ARGUMENT)
        if found is None:
            return None
        if not found:
            return self._give_up()
        self._key, self._searched, self._step = found, self._at, self._value
        return []

    def _value(self) -> list[Delta] | None:
        """Read the text of an argument.

        It ends with its closing tag, if another argument or the end of the call follows.
        """
        while (end := self._raw.find(END_OF_ARGUMENT, self._searched)) >= 0:
            rest = self._raw[end + len(END_OF_ARGUMENT) :].lstrip()
            if any(one.startswith(rest) and one != rest for one in (ARGUMENT, END_OF_FUNCTION)):
                return None
            if rest.startswith((ARGUMENT, END_OF_FUNCTION)):
                value = self._raw[self._at : end].removeprefix("\n").removesuffix("\n")
                schema = self._types.get(self._name)
                types = ALL if schema is None else schema.of_property(self._key)
                self._arguments[self._key] = _typed(value, types)
                self._at, self._step = end + len(END_OF_ARGUMENT), self._argument
                return []
            self._searched = end + len(END_OF_ARGUMENT)
        self._searched = max(self._searched, len(self._raw) - len(END_OF_ARGUMENT))
        return None

    def _complete(self, rest: str) -> list[Delta]:
        arguments = arguments_of(self._arguments)
        if arguments is None:
            return self._give_up()
        self._raw, self._at, self._mark, self._step = rest, 0, "", self._after
        return self._writer.deltas(Call(self._name, arguments))

    def _after(self) -> list[Delta] | None:
        """After a call, read the closing mark, or text."""
        rest = self._raw.lstrip()
        if rest != CLOSE and CLOSE.startswith(rest):
            return None
        self._raw = rest.removeprefix(CLOSE)
        self._content, self._step = TextBeforeMarks((OPEN, FUNCTION), strips=True), self._text
        return []

    def _named(self, tag: str) -> str | None:
        """Return the name in a tag; "" for other text; None if the tag is incomplete."""
        rest = self._raw[self._at :].lstrip()
        if tag.startswith(rest):
            return None
        match = _NAME.match(rest, len(tag)) if rest.startswith(tag) else None
        if match is None:
            is_open = rest.startswith(tag) and _OPEN.fullmatch(rest, len(tag))
            return None if is_open else ""
        self._at = len(self._raw) - len(rest) + match.end()
        return match[1].strip()

    def _give_up(self) -> list[Delta]:
        """Treat the mark as content, and search the text after it for other marks."""
        text, self._mark, self._at = self._mark, "", 0
        if not text and self._raw.startswith(FUNCTION):
            text, self._raw = FUNCTION, self._raw[len(FUNCTION) :]
        self._content, self._step = TextBeforeMarks((OPEN, FUNCTION)), self._text
        return [ContentDelta(text)] if text else []


def _typed(text: str, types: Types) -> Any:
    """Return the value of an argument, in one of the types if possible, else as text.

    A text that may be a string is one, but for null: null and None are null where it is allowed.
    """
    if types == ALL or ("string" in types and not ("null" in types and text in ("null", "None"))):
        return text
    try:
        value = _WORDS[text] if text in _WORDS else loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float) and "number" not in types and value.is_integer():
        value = int(value)
    return value if types & types_of_value(value) else text


def _make(request: ParseRequest) -> Parser:
    return XmlCallParser(request.tools)


def _serves(chat: ModelChat) -> bool:
    return FUNCTION in chat.chat_template and ARGUMENT in chat.chat_template


_SCHEMA = {"city": {"type": "string"}, "days": {"type": "integer"}, "parts": {"type": "array"}}
_REQUEST = ParseRequest(
    tools=(
        {"name": "get_weather", "parameters": {"type": "object", "properties": _SCHEMA}},
        {"name": "now"},
    )
)
_WEATHER = """<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
<parameter=days>
3
</parameter>
<parameter=parts>
["rain", {"wind": "m/s"}]
</parameter>
</function>
</tool_call>"""
_CALL = ExampleCall(
    "get_weather", '{"city": "Paris", "days": 3, "parts": ["rain", {"wind": "m/s"}]}'
)
_NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
_CODE = (
    "<function=run><parameter=code>\nif a < b:\n\n    print('x')  # </b>\n</parameter></function>"
)
_EXAMPLES = (
    Example((Piece(_WEATHER, calls=(_CALL,)),), _REQUEST),
    Example(
        (
            Piece("I look it up.\n\n", content="I look it up."),
            Piece(_WEATHER, calls=(_CALL,)),
            Piece("\n" + _NOW, calls=(ExampleCall("now"),)),
        ),
        _REQUEST,
    ),
    Example(
        (
            Piece(_NOW, calls=(ExampleCall("now"),)),
            Piece("\nAnd then:\n", content="And then:"),
            Piece(
                _CODE,
                calls=(ExampleCall("run", '{"code": "if a < b:\\n\\n    print(\'x\')  # </b>"}'),),
            ),
            Piece("\nDone.", content="Done."),
        )
    ),
    Example((Piece("A call begins with <tool_call>, then <function= and its name follow."),)),
)

qwen3_coder = OutputFormat(_make, _serves, examples=_EXAMPLES)
