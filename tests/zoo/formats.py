"""Faulty parsers of tool calls and of reasoning: they lose or change text, find too little or too
much, or depend on the pieces in which text comes.
"""

from __future__ import annotations

import dataclasses
import html
import json
import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any

from enginebay.contracts.output_format import (
    ContentDelta,
    Delta,
    OutputFormat,
    ParseRequest,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallStart,
)
from enginebay_server.parsing.json_calls import bare_json, hermes
from enginebay_server.parsing.thinking import think
from enginebay_testing.output_formats import output_format_checks
from enginebay_testing.verdicts import Check
from tests.zoo.right_parsers import RIGHT as OTHERS
from tests.zoo.right_parsers import AtTheEnd, ByPattern, Wrapped, by_pattern, made, said, said_in


def by_text(
    change: Callable[[str], str], kind: Any = ContentDelta, right: OutputFormat = hermes
) -> OutputFormat:
    """A format whose content, or whose deltas of another kind, a function changes."""

    class Changed(Wrapped):
        def instead(self, delta: Delta) -> Iterable[Delta]:
            if isinstance(delta, kind):
                delta = dataclasses.replace(delta, text=change(delta.text))
            yield delta

    return made(lambda request: Changed(request, right), right)


def by_value(change: Callable[[Any], Any], **options: Any) -> OutputFormat:
    """A format whose arguments are read, changed by a function, and written again."""
    return by_text(
        lambda text: json.dumps(change(json.loads(text, **options)), ensure_ascii=False),
        ToolArgumentsDelta,
    )


def of_think(kind: type[Wrapped]) -> OutputFormat:
    """A format of reasoning with a faulty parser."""
    return made(lambda request: kind(request, think), think)


class RaisesOnNul(Wrapped):
    def feed(self, text: str) -> list[Delta]:
        if "\0" in text:
            raise ValueError("embedded null byte")
        return super().feed(text)


class NeedsUtf8(Wrapped):
    def feed(self, text: str) -> list[Delta]:
        return super().feed(text.encode().decode())


class RaisesOnLongText(Wrapped):
    length = 0

    def feed(self, text: str) -> list[Delta]:
        self.length += len(text)
        if self.length > 4096:
            raise MemoryError("the buffer of 4096 characters is full")
        return super().feed(text)


class EmptyPieceEnds(Wrapped):
    """Takes an empty piece for the end of the text."""

    has_ended = False

    def feed(self, text: str) -> list[Delta]:
        self.has_ended = self.has_ended or not text
        return said(text) if self.has_ended else super().feed(text)


class ByPiece(Wrapped):
    """Parses each piece alone."""

    def feed(self, text: str) -> list[Delta]:
        self.inner = hermes.make_parser(self.request)
        return [*self.inner.feed(text), *self.inner.finish()]

    def finish(self) -> list[Delta]:
        return []


class NumbersByPiece(Wrapped):
    """Numbers calls from 0 in each piece."""

    def changed(self, deltas: list[Delta]) -> list[Delta]:
        first = next((one.index for one in deltas if isinstance(one, ToolCallStart)), 0)
        return [
            dataclasses.replace(delta, index=delta.index - first)
            if isinstance(delta, (ToolCallStart, ToolArgumentsDelta))
            else delta
            for delta in deltas
        ]


def one_numbering() -> OutputFormat:
    """All parsers share what they have begun to read."""
    shared: dict[str, Any] = {}

    class Sharing(Wrapped):
        def __init__(self, request: ParseRequest) -> None:
            super().__init__(request)
            shared["inner"] = self.inner

        def feed(self, text: str) -> list[Delta]:
            self.inner = shared["inner"]
            return super().feed(text)

    return made(Sharing)


class OneId(Wrapped):
    def instead(self, delta: Delta) -> Iterable[Delta]:
        yield dataclasses.replace(delta, id="call") if isinstance(delta, ToolCallStart) else delta


class FindsNothing(Wrapped):
    def feed(self, text: str) -> list[Delta]:
        return said(text)


class FindsOneCall(Wrapped):
    def instead(self, delta: Delta) -> Iterable[Delta]:
        if not isinstance(delta, (ToolCallStart, ToolArgumentsDelta)) or delta.index == 0:
            yield delta


class DropsWhatIsHeld(Wrapped):
    def finish(self) -> list[Delta]:
        return []


class DropsIncompleteCalls(Wrapped):
    def finish(self) -> list[Delta]:
        rest = super().finish()
        return [] if "<tool_call>" in "".join(said_in(rest)) else rest


class DropsPartsOfMarks(Wrapped):
    """Drops the beginning of a mark at the end of the text."""

    def finish(self) -> list[Delta]:
        return said(re.sub("<[a-z_]*$", "", "".join(said_in(super().finish()))))


class RepairsIncompleteCalls(Wrapped):
    """Closes strings and brackets of a call that is cut off."""

    def finish(self) -> list[Delta]:
        rest = super().finish()
        before = '<tool_call>{"name": "now"}</tool_call>' * self.num_calls
        for end in ("}", "}}", '"}}'):
            again = hermes.make_parser(self.request)
            again.feed(before)
            repaired = again.feed("".join(said_in(rest)) + end)
            if any(isinstance(one, ToolCallStart) for one in repaired):
                return repaired
        return rest


class SendsIncompleteArguments(Wrapped):
    """Gives arguments out before the call is complete."""

    def finish(self) -> list[Delta]:
        rest = super().finish()
        begun = r'<tool_call>\s*{"name": "(\w+)", "arguments": ({.*)'
        found = re.search(begun, "".join(said_in(rest)), re.DOTALL)
        if found is None:
            return rest
        return [
            ToolCallStart(self.num_calls, "call", found[1]),
            ToolArgumentsDelta(self.num_calls, found[2]),
        ]


def dropping(is_dropped: Callable[[int, int], bool]) -> OutputFormat:
    """A format that drops content by the number of calls before and behind it."""

    class Dropping(AtTheEnd):
        def finish(self) -> list[Delta]:
            inner = hermes.make_parser(self.request)
            deltas = [*inner.feed(self.text), *inner.finish()]
            calls = [at for at, one in enumerate(deltas) if isinstance(one, ToolCallStart)]
            kept = []
            for at, one in enumerate(deltas):
                before = sum(call < at for call in calls)
                if not isinstance(one, ContentDelta) or not is_dropped(before, len(calls) - before):
                    kept.append(one)
            return kept

    return made(Dropping)


class DropsUnknownTools(Wrapped):
    def instead(self, delta: Delta) -> Iterable[Delta]:
        if isinstance(delta, ToolCallStart):
            self.is_dropped = delta.name not in self.request.names
        if not isinstance(delta, (ToolCallStart, ToolArgumentsDelta)) or not self.is_dropped:
            yield delta


class MarksOfBadCalls(ByPattern):
    """Drops the marks of a call that is no JSON."""

    def instead_of(self, match: re.Match[str]) -> list[Delta]:
        return said(match[1])


class EmptiesBadCalls(ByPattern):
    """Gives a call that is no JSON empty arguments."""

    def instead_of(self, match: re.Match[str]) -> list[Delta]:
        named = re.search(r'"name": "(\w+)"', match[1])
        return said(match[0]) if named is None else self.called(named[1], "{}")


class AllowsAnything(ByPattern):
    """Gives arguments out as they stand, whatever they are."""

    def call_in(self, text: str) -> tuple[str, str] | None:
        found = re.fullmatch(r'\s*{"name": "(\w+)", "arguments": (.*)}\s*', text, re.DOTALL)
        return None if found is None else (found[1], found[2])


class SendsHalves(ByPattern):
    """Writes halves of UTF-16 pairs in arguments."""

    def call_in(self, text: str) -> tuple[str, str] | None:
        found = super().call_in(text)
        return found and (found[0], json.dumps(json.loads(found[1]), ensure_ascii=False))


class FindsQuotedCalls(AtTheEnd):
    """Finds JSON within text, where it is no call."""

    def finish(self) -> list[Delta]:
        start = max(0, self.text.find("{"))
        inner = bare_json.make_parser(self.request)
        return [*said(self.text[:start]), *inner.feed(self.text[start:]), *inner.finish()]


class CutOffIsTheAnswer(Wrapped):
    """Takes reasoning without a closing mark for the answer."""

    text = ""

    def feed(self, text: str) -> list[Delta]:
        self.text += text
        return []

    def finish(self) -> list[Delta]:
        if "</think>" not in self.text:
            return said(self.text)
        return [*self.inner.feed(self.text), *self.inner.finish()]


class DropsCutOffReasoning(CutOffIsTheAnswer):
    def finish(self) -> list[Delta]:
        if self.text.startswith("<think>") and "</think>" not in self.text:
            return []
        return [*self.inner.feed(self.text), *self.inner.finish()]


class FindsLaterReasoning(CutOffIsTheAnswer):
    """Takes every pair of marks for reasoning."""

    def finish(self) -> list[Delta]:
        deltas: list[Delta] = []
        at = 0
        for match in re.finditer(r"<think>(.*?)(?:</think>\s*|$)", self.text, re.DOTALL):
            deltas += said(self.text[at : match.start()])
            deltas += [ReasoningDelta(match[1].strip())]
            at = match.end()
        return [*deltas, *said(self.text[at:])]


class IgnoresThePrompt(Wrapped):
    def __init__(self, request: ParseRequest, right: OutputFormat) -> None:
        super().__init__(dataclasses.replace(request, prompt_end=lambda _: ""), right)


class DropsTheAnswer(Wrapped):
    """Drops what follows reasoning."""

    has_thought = False

    def instead(self, delta: Delta) -> Iterable[Delta]:
        self.has_thought = self.has_thought or isinstance(delta, ReasoningDelta)
        if not self.has_thought or isinstance(delta, ReasoningDelta):
            yield delta


FAULTS: dict[str, Any] = {
    "a parser, and no format": Wrapped,
    "no examples": dataclasses.replace(hermes, examples=()),
    "serves any model": dataclasses.replace(hermes, serves=lambda _: True),
    "declares reasoning": dataclasses.replace(hermes, has_reasoning=True),
    "raises on NUL": made(RaisesOnNul),
    "raises on half of a pair": made(NeedsUtf8),
    "raises on long text": made(RaisesOnLongText),
    "an empty piece ends the text": made(EmptyPieceEnds),
    "each piece alone": made(ByPiece),
    "numbers calls by piece": made(NumbersByPiece),
    "parsers share their state": one_numbering(),
    "one id for all calls": made(OneId),
    "finds no call": made(FindsNothing),
    "finds one call": made(FindsOneCall),
    "finds quoted calls": made(FindsQuotedCalls, bare_json),
    "drops what is held": made(DropsWhatIsHeld),
    "drops incomplete calls": made(DropsIncompleteCalls),
    "drops parts of marks": made(DropsPartsOfMarks),
    "repairs incomplete calls": made(RepairsIncompleteCalls),
    "sends incomplete arguments": made(SendsIncompleteArguments),
    "drops text before calls": dropping(lambda before, after: after > 0 and not before),
    "drops text between calls": dropping(lambda before, after: before > 0 and after > 0),
    "drops text after calls": dropping(lambda before, after: before > 0 and not after),
    "drops calls of unknown tools": made(DropsUnknownTools),
    "drops the marks of bad calls": by_pattern(MarksOfBadCalls),
    "empties bad calls": by_pattern(EmptiesBadCalls),
    "arguments that are not JSON": by_pattern(AllowsAnything),
    "halves of pairs in arguments": by_pattern(SendsHalves),
    "collapses blank lines": by_text(lambda text: re.sub(r"\n{3,}", "\n\n", text)),
    "collapses spaces": by_text(lambda text: re.sub("  +", " ", text)),
    "changes ends of lines": by_text(lambda text: text.replace("\r\n", "\n")),
    "drops control characters": by_text(lambda text: re.sub(r"[\x00-\x08\x7f]", "", text)),
    "composes characters": by_text(lambda text: unicodedata.normalize("NFC", text)),
    "unescapes content": by_text(html.unescape),
    "strips content": by_text(str.strip),
    "a byte order mark is lost": by_text(lambda text: text.replace("\ufeff", "")),
    "ASCII in arguments": by_text(
        lambda text: text.encode("ascii", "ignore").decode(), ToolArgumentsDelta
    ),
    "sorts keys": by_value(lambda value: dict(sorted(value.items()))),
    "strips values": by_value(
        lambda value: {
            key: one.strip() if isinstance(one, str) else one for key, one in value.items()
        }
    ),
    "nested objects as texts": by_value(
        lambda value: {
            key: json.dumps(one) if isinstance(one, dict) else one for key, one in value.items()
        }
    ),
    "integers as floats": by_value(lambda value: value, parse_int=lambda text: int(float(text))),
    "drops nulls": by_value(
        lambda value: {key: one for key, one in value.items() if one is not None}
    ),
    "digits as numbers": by_value(
        lambda value: {
            key: int(one) if isinstance(one, str) and one.isdecimal() else one
            for key, one in value.items()
        }
    ),
    "composes arguments": by_text(
        lambda text: unicodedata.normalize("NFC", text), ToolArgumentsDelta
    ),
    "finds no reasoning": of_think(FindsNothing),
    "reasoning cut off is the answer": of_think(CutOffIsTheAnswer),
    "drops reasoning cut off": of_think(DropsCutOffReasoning),
    "finds reasoning in the answer": of_think(FindsLaterReasoning),
    "ignores the prompt": of_think(IgnoresThePrompt),
    "drops the answer": of_think(DropsTheAnswer),
    "collapses blank lines of reasoning": by_text(
        lambda text: re.sub(r"\n{3,}", "\n\n", text), ReasoningDelta, think
    ),
    "drops parts of marks in reasoning": by_text(
        lambda text: re.sub(r"</[a-z]*", "", text), ReasoningDelta, think
    ),
    "strips an answer without reasoning": by_text(str.lstrip, ContentDelta, think),
}

RIGHT: dict[str, OutputFormat] = {"hermes": hermes, "think": think, **OTHERS}


def checks(part: Any) -> list[Check]:
    """The kit's suite."""
    return output_format_checks(part)
