"""Right parsers of output formats that are organised otherwise than those of enginebay, and the
wrapper by which a fault changes a right one.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from enginebay.contracts.output_format import (
    ContentDelta,
    Delta,
    Example,
    ExampleCall,
    OutputFormat,
    Parser,
    ParseRequest,
    Piece,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallStart,
)
from enginebay_server.parsing.json_calls import hermes


class Wrapped(Parser):
    """A right parser. Each fault changes its texts or its deltas."""

    def __init__(self, request: ParseRequest, right: OutputFormat = hermes) -> None:
        self.inner = right.make_parser(request)
        self.request = request
        self.num_calls = 0

    def feed(self, text: str) -> list[Delta]:
        deltas = self.inner.feed(text)
        self.num_calls += sum(isinstance(one, ToolCallStart) for one in deltas)
        return self.changed(deltas)

    def finish(self) -> list[Delta]:
        return self.changed(self.inner.finish())

    def changed(self, deltas: list[Delta]) -> list[Delta]:
        """The deltas in the place of those of one call."""
        return [other for delta in deltas for other in self.instead(delta)]

    def instead(self, delta: Delta) -> Iterable[Delta]:
        """The deltas in the place of one."""
        yield delta


class AtTheEnd(Parser):
    """Gives everything out when the text has ended."""

    def __init__(self, request: ParseRequest) -> None:
        self.text = ""
        self.request = request

    def feed(self, text: str) -> list[Delta]:
        self.text += text
        return []


class Buffered(AtTheEnd):
    def finish(self) -> list[Delta]:
        parser = hermes.make_parser(self.request)
        return [*parser.feed(self.text), *parser.finish()]


class ByCharacter(Wrapped):
    """Gives texts out by characters."""

    def instead(self, delta: Delta) -> Iterable[Delta]:
        if isinstance(delta, ToolCallStart):
            yield delta
        else:
            yield from (dataclasses.replace(delta, text=char) for char in delta.text)


class ByPattern(AtTheEnd):
    """Finds calls of Hermes by a regular expression. A closing mark in a string ends a call."""

    pattern = re.compile(r"\s*<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)

    def finish(self) -> list[Delta]:
        self.count, at = 0, 0
        deltas: list[Delta] = []
        for match in self.pattern.finditer(self.text):
            deltas += said(self.text[at : match.start()])
            at = match.end()
            found = self.call_in(match[1])
            if found is None:
                deltas += self.instead_of(match)
            else:
                deltas += self.called(*found)
                at += len(self.text[at:]) - len(self.text[at:].lstrip())
        return [*deltas, *said(self.text[at:])]

    def called(self, name: str, arguments: str) -> list[Delta]:
        start = ToolCallStart(self.count, f"call_{self.count}", name)
        self.count += 1
        return [start, ToolArgumentsDelta(start.index, arguments)]

    def call_in(self, text: str) -> tuple[str, str] | None:
        """Name and arguments of a call; None for other text."""
        try:
            call = json.loads(text, parse_constant=refuse)
            name, arguments = call["name"], call["arguments"]
            written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        if not isinstance(arguments, dict):
            return None
        is_whole = not any("\ud800" <= char <= "\udfff" for char in written)
        return name, written if is_whole else json.dumps(arguments)

    def instead_of(self, match: re.Match[str]) -> list[Delta]:
        """What is found of a call that is not JSON."""
        return said(match[0])


def said(text: str) -> list[Delta]:
    """Text as content."""
    return [ContentDelta(text)] if text else []


def said_in(deltas: Iterable[Delta]) -> list[str]:
    """The content in deltas."""
    return [one.text for one in deltas if isinstance(one, ContentDelta)]


def refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


class LineParser(Parser):
    """A line that begins with "CALL " names a tool of the request, before its arguments."""

    def __init__(self, request: ParseRequest) -> None:
        self.names = request.names
        self.line, self.count = "", 0

    def feed(self, text: str) -> list[Delta]:
        *lines, self.line = (self.line + text).split("\n")
        return [delta for line in lines for delta in self.parse(line, "\n")]

    def finish(self) -> list[Delta]:
        return self.parse(self.line, "")

    def parse(self, line: str, end: str) -> list[Delta]:
        """What a line has."""
        name, _, arguments = line.removeprefix("CALL ").partition(" ")
        try:
            value = json.loads(arguments, parse_constant=refuse)
        except (ValueError, RecursionError):
            value = None
        if not line.startswith("CALL ") or name not in self.names or not isinstance(value, dict):
            return said(line + end)
        index, self.count = self.count, self.count + 1
        return [ToolCallStart(index, f"line{index}", name), ToolArgumentsDelta(index, arguments)]


class BracketParser(AtTheEnd):
    """Calls are [[name key=value; key=value]], with texts as values."""

    pattern = re.compile(r"\[\[(\w+)((?: \w+=[^;\]]*;?)*)\]\]")

    def finish(self) -> list[Delta]:
        deltas: list[Delta] = []
        at = 0
        for index, match in enumerate(self.pattern.finditer(self.text)):
            deltas += said(self.text[at : match.start()])
            pairs = [one.split("=", 1) for one in match[2].removeprefix(" ").split("; ") if one]
            arguments = json.dumps(dict(pairs), ensure_ascii=False)
            deltas += [ToolCallStart(index, f"b{index}", match[1])]
            deltas += [ToolArgumentsDelta(index, arguments)]
            at = match.end()
        return [*deltas, *said(self.text[at:])]


class RuleParser(AtTheEnd):
    """Reasoning is the text before the first line of ====, and has no opening mark."""

    def finish(self) -> list[Delta]:
        reasoning, mark, content = self.text.partition("\n====\n")
        thought: list[Delta] = [ReasoningDelta(reasoning)] if mark and reasoning else []
        return [*thought, *said(content if mark else reasoning)]


def made(
    kind: Callable[[ParseRequest], Parser], right: OutputFormat = hermes, **others: Any
) -> OutputFormat:
    """A format of another parser, with the examples of a right one."""
    return dataclasses.replace(right, make_parser=kind, **others)


def by_pattern(kind: type[ByPattern]) -> OutputFormat:
    """A format of calls that have both marks."""
    return made(kind, examples=[*hermes.examples[:3], hermes.examples[-1]])


def formed(kind: Callable[[ParseRequest], Parser], *examples: Example) -> OutputFormat:
    """A format that is chosen by name alone."""
    return OutputFormat(kind, lambda _: False, examples=examples)


PARIS = ExampleCall("get_weather", '{"city": "Paris"}')
RIGHT = {
    "everything at the end": made(Buffered),
    "by characters": made(ByCharacter),
    "by a pattern": by_pattern(ByPattern),
    "lines": formed(
        LineParser,
        Example(
            (
                Piece("I look.\n"),
                Piece('CALL get_weather {"city": "Paris"}\n', calls=[PARIS]),
                Piece("CALL now {}\n", calls=[ExampleCall("now")]),
                Piece("CALL me later."),
            )
        ),
    ),
    "brackets": formed(
        BracketParser,
        Example(
            (
                Piece("I look. "),
                Piece("[[get_weather city=Paris]]", calls=[PARIS]),
                Piece(" and [[so on]] "),
                Piece(
                    "[[set name=lamp; on=1]]",
                    calls=[ExampleCall("set", '{"name": "lamp", "on": "1"}')],
                ),
            )
        ),
    ),
    "no opening mark": formed(
        RuleParser,
        Example(
            (
                Piece("Is it Paris?\n====\n", reasoning="Is it Paris?"),
                Piece("It is.\n====\nSure."),
            ),
            at_start=True,
        ),
    ),
}
