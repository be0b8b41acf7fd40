"""Tool calls as JSON: after a mark, between two marks, or as the whole answer."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Sequence

from enginebay.contracts.output_format import (
    ContentDelta,
    Delta,
    Example,
    ModelChat,
    OutputFormat,
    Parser,
    ParseRequest,
)
from enginebay_server.parsing.calls import (
    CALL_KEYS,
    Call,
    CallWriter,
    calls_of,
    loads,
    mistral_id,
    new_id,
)
from enginebay_server.parsing.json_end import JsonEnd, NotJsonError
from enginebay_server.parsing.json_examples import BARE, HERMES, LLAMA3, MISTRAL
from enginebay_server.parsing.marks import TextBeforeMarks

_FIRST_KEY = re.compile(r'[\s\[]*\{\s*"([^"\\]*)"')
_HEADER = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*([\w-]+)\s*)?(?:\[ARGS\])?\s*")
"""Matches Mistral's name, id and mark before the arguments of a call."""
_PART_OF_HEADER = re.compile(r"[\s\w.\[\]-]{0,200}")


@dataclasses.dataclass(frozen=True, slots=True)
class CallStyle:
    """The spelling of calls in a format. At least one of `mark` and `is_bare` is set."""

    mark: str | None = None
    """The mark before the JSON of a call, or of a list of calls."""
    close: str | None = None
    """The mark after the JSON."""
    is_bare: bool = False
    """Whether an answer may begin with a call without marks, of a tool of the request."""
    has_header: bool = False
    """Whether name and id may precede the JSON, which then has the arguments only."""
    make_id: Callable[[], str] = new_id


class JsonCallParser(Parser):
    """Returns a call when its JSON is complete. A mark without a call after it is content."""

    def __init__(self, style: CallStyle, names: Collection[str]) -> None:
        self._style = style
        self._names = names
        self._marks = () if style.mark is None else (style.mark,)
        self._writer = CallWriter(style.make_id)
        self._content = TextBeforeMarks(self._marks)
        self._json = JsonEnd()
        self._raw = ""
        """Text that was not returned yet, without the text in `_content`."""
        self._num_seen = 0
        """Number of characters of `_raw` that `_json` has read."""
        self._header: Call | None = None
        self._mark = ""
        """The mark before the JSON, with white space, if it was not returned."""
        self._is_marked = False
        """Whether a mark precedes the calls that are being read."""
        self._step: Callable[[], list[Delta] | None] = self._begin if style.is_bare else self._text

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
            if self._step == self._after and (self._style.close or "").startswith(self._rest):
                self._raw = ""  # nothing, or the beginning of the closing mark
            deltas += self._give_up()
            deltas += self.feed("")
        held = self._content.finish()
        return [*deltas, ContentDelta(held)] if held else deltas

    # The steps return deltas, or None when they need more text. `_step` is the next one.

    def _begin(self) -> list[Delta] | None:
        """Find out whether a call begins, at the start of the answer or after a mark."""
        raw = self._raw.lstrip()
        mark = self._style.mark or ""
        if not raw or (not self._mark and raw != mark and mark.startswith(raw)):
            return None
        is_json = raw[0] in "{[" and not raw.startswith(("[ARGS]", "[CALL_ID]"))
        if self._style.has_header and self._mark and not is_json:
            return self._read_header()
        if is_json:
            return self._expect_value()
        return self._give_up()

    def _read_header(self) -> list[Delta] | None:
        """Read name and id of a call, up to its arguments."""
        head, brace, _ = self._raw.partition("{")
        if not brace:
            return None if _PART_OF_HEADER.fullmatch(head) else self._give_up()
        match = _HEADER.fullmatch(head)
        if match is None:
            return self._give_up()
        self._header = Call(match[1], "", match[2])
        self._mark += head
        self._raw = self._raw[len(head) :]
        return self._expect_value()

    def _expect_value(self) -> list[Delta]:
        self._json, self._num_seen, self._step = JsonEnd(), 0, self._value
        return []

    def _value(self) -> list[Delta] | None:
        """Read the JSON of a call."""
        first = None if self._is_marked else _FIRST_KEY.match(self._raw)
        if first is not None and first[1] not in CALL_KEYS:
            return self._give_up()
        start = self._num_seen or len(self._raw) - len(self._raw.lstrip())
        try:
            end = self._json.find(self._raw, start)
            self._num_seen = len(self._raw)
            if end is None:
                return None
            calls = self._calls(self._raw[:end])
        except (NotJsonError, ValueError, RecursionError):
            calls, end = [], 0
        if not calls:
            return self._give_up()
        self._raw, self._mark, self._header, self._step = self._raw[end:], "", None, self._after
        return [delta for call in calls for delta in self._writer.deltas(call)]

    def _calls(self, text: str) -> list[Call]:
        value = loads(text)
        if self._header is not None:
            value = {"name": self._header.name, "id": self._header.id, "arguments": value}
        return calls_of(value, None if self._is_marked else self._names)

    def _after(self) -> list[Delta] | None:
        """After a call, read the closing mark, another call, or text."""
        rest = self._rest
        close, mark = self._style.close or "", self._style.mark or ""
        if not rest or self._is_partial(rest):
            return None
        between = self._raw[: len(self._raw) - len(rest)]
        between = between if between.strip() else ""
        if mark and rest.startswith(mark):
            self._mark, self._raw, self._step = between + mark, rest[len(mark) :], self._begin
            self._is_marked = True
            return []
        if rest[0] in "{[":
            self._mark, self._raw = between, rest
            return self._expect_value()
        if close and rest.startswith(close) and not between:
            self._raw = rest[len(close) :]
        self._content = TextBeforeMarks(self._marks, strips=True)
        self._is_marked, self._step = False, self._text
        return []

    @property
    def _rest(self) -> str:
        """Return the text after a call, without separators between two calls."""
        return self._raw.lstrip(" \t\r\n;,")

    def _is_partial(self, rest: str) -> bool:
        """Return whether the text after a call is an incomplete mark."""
        marks = [mark for mark in (self._style.close, self._style.mark) if mark]
        return any(mark != rest and mark.startswith(rest) for mark in marks)

    def _text(self) -> list[Delta] | None:
        """Read content."""
        if not self._raw:
            return None
        text, mark = self._content.feed(self._raw)
        self._raw = ""
        if mark is not None:
            self._mark, self._raw, self._step = mark.text, mark.rest, self._begin
            self._is_marked = True
        return [ContentDelta(text)] if text else []

    def _give_up(self) -> list[Delta]:
        """Treat the mark as content, and search the text after it for other marks."""
        text, self._mark, self._header = self._mark, "", None
        self._is_marked = False
        self._content, self._step = TextBeforeMarks(self._marks), self._text
        return [ContentDelta(text)] if text else []


def _format(
    style: CallStyle,
    serves: Callable[[str], bool],
    examples: Sequence[Example],
    *,
    keeps_special_tokens: bool = False,
) -> OutputFormat:
    def make_parser(request: ParseRequest) -> Parser:
        return JsonCallParser(style, request.names)

    def serves_chat(chat: ModelChat) -> bool:
        return serves(chat.chat_template)

    return OutputFormat(make_parser, serves_chat, keeps_special_tokens, examples=examples)


hermes = _format(
    CallStyle(mark="<tool_call>", close="</tool_call>"),
    lambda template: "<tool_call>" in template and "<function=" not in template,
    HERMES,
)
llama3 = _format(
    CallStyle(mark="<|python_tag|>", is_bare=True),
    lambda template: "<|python_tag|>" in template,
    LLAMA3,
)
mistral = _format(
    CallStyle(mark="[TOOL_CALLS]", has_header=True, make_id=mistral_id),
    lambda template: "[TOOL_CALLS]" in template,
    MISTRAL,
    keeps_special_tokens=True,
)
bare_json = _format(CallStyle(is_bare=True), lambda template: "tools" in template, BARE)
