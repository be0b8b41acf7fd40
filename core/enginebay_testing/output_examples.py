"""Derives texts from the examples of an output format: with other text around them, twice, with
other values, malformed, and cut off. Each comes with the ways in which it may be parsed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from enginebay.contracts.output_format import Example, ExampleCall, ParseRequest, Piece
from enginebay_testing.output_parses import Way, as_found, as_text, canonical, is_encodable
from enginebay_testing.output_texts import (
    JSON_STRINGS,
    LINES,
    LONG,
    NOT_OBJECTS,
    OBJECTS,
    WORDS,
)

ENOUGH = 1 << 30
"""A number of tokens that is larger than any prompt."""


@dataclasses.dataclass(frozen=True)
class ParseCase:
    """A text, and the ways in which each of its pieces may be parsed. Without ways, anything that
    is well formed is right.
    """

    request: ParseRequest
    text: str
    ways: Sequence[Sequence[Way]] = ()


def example_request(example: Example) -> ParseRequest:
    """Return the example's request, with the tools that it calls if it has none."""
    return example.request if example.request.tools else _with_called_tools(example)


def _with_called_tools(example: Example) -> ParseRequest:
    names = {call.name: None for piece in example.pieces for call in piece.calls}
    return dataclasses.replace(example.request, tools=[{"name": name} for name in names])


def is_begun(example: Example) -> bool:
    """Return whether the prompt may have begun the answer."""
    return bool(example.request.prompt_end(ENOUGH))


def _case(example: Example, pieces: Sequence[Piece], at: Mapping[int, Any] = {}) -> ParseCase:
    """Return a case of pieces that are found, except for those whose ways `at` has."""
    ways = [at.get(place, (as_found(piece),)) for place, piece in enumerate(pieces)]
    return ParseCase(example_request(example), "".join(piece.text for piece in pieces), ways)


def surrounded(example: Example) -> Iterator[ParseCase]:
    """Yield the example before and behind lines of text."""
    own = list(example.pieces)
    for line in LINES:
        if not _is_open(own[-1]):
            yield _case(example, [*own, Piece(f"\n{line}")])
        if is_begun(example) or _has_no_opening(own[0]):
            continue
        before = [Piece(f"{line}\n"), *own]
        if example.at_start:
            raw = [(as_text(piece),) for piece in before]
            yield _case(example, before, dict(enumerate(raw)))
        else:
            yield _case(example, before)


def _is_open(piece: Piece) -> bool:
    """Return whether a piece is reasoning without a closing mark, so that more may follow."""
    return piece.reasoning is not None and piece.text.rstrip().endswith(piece.reasoning.strip())


def _has_no_opening(piece: Piece) -> bool:
    """Return whether a piece is reasoning without an opening mark, so that more may precede."""
    return piece.reasoning is not None and piece.text.lstrip().startswith(piece.reasoning.strip())


def repeated(example: Example) -> Iterator[ParseCase]:
    """Yield the example twice, with and without text in between. If its marks count at the
    beginning only, the second one may be content.
    """
    own = list(example.pieces)
    if _is_open(own[-1]) or (is_begun(example) and not example.at_start):
        return
    for between in ("\n", "\nIn between,\n\n\nblank  lines; and ]}, more.\n"):
        pieces = [*own, Piece(between), *own]
        second = range(len(own) + 1, len(pieces)) if example.at_start else ()
        ways = {at: (as_found(pieces[at]), as_text(pieces[at])) for at in second}
        yield _case(example, pieces, ways)


def with_unknown_tools(example: Example) -> Iterator[ParseCase]:
    """Yield the example with requests that have no tools, other tools, and tools with strange
    parameters. Its calls are found, or are content. Without the types in the parameters, values may
    be texts.
    """
    calls = [at for at, piece in enumerate(example.pieces) if piece.calls]
    ways = {}
    for at in calls:
        piece = example.pieces[at]
        untyped = [ExampleCall(one.name, _as_texts(one.arguments)) for one in piece.calls]
        ways[at] = (as_found(piece), as_text(piece), untyped)
    case = _case(example, example.pieces, ways)
    strange = [{**tool, "parameters": None} for tool in case.request.tools]
    for tools in ((), ({"name": "other"},), strange) if calls else ():
        yield dataclasses.replace(case, request=dataclasses.replace(case.request, tools=tools))


def _as_texts(arguments: str) -> str:
    values = json.loads(arguments)
    texts = {key: one if isinstance(one, str) else json.dumps(one) for key, one in values.items()}
    return json.dumps(texts)


def json_span(piece: Piece) -> tuple[int, int] | None:
    """Return where the arguments of a piece's first call stand as JSON; None if they do not."""
    wanted = canonical(piece.calls[0].arguments)
    at = piece.text.find("{")
    while at >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(piece.text, at)
        except ValueError:
            value, end = None, at
        if json.dumps(value) == wanted:
            return at, end
        at = piece.text.find("{", at + 1)
    return None


def text_argument(piece: Piece) -> tuple[str, str] | None:
    """Return name and value of an argument of the first call that is some letters, and that stands
    in the piece once; None if there is none.
    """
    for key, value in json.loads(piece.calls[0].arguments).items():
        is_word = isinstance(value, str) and value.isalpha() and len(value) > 2
        if is_word and piece.text.count(value) == 1:
            return key, value
    return None


def with_arguments(piece: Piece, span: tuple[int, int], written: str, meant: str) -> Piece:
    """Return a piece with another JSON text as the arguments of its first call."""
    text = piece.text[: span[0]] + written + piece.text[span[1] :]
    first, *others = piece.calls
    return Piece(text, calls=(ExampleCall(first.name, meant), *others))


def with_other_values(example: Example) -> Iterator[ParseCase]:
    """Yield the example with other arguments in each piece of calls."""
    named = [{"name": tool["name"]} for tool in example_request(example).tools]
    untyped = dataclasses.replace(example.request, tools=named)
    for at, piece in enumerate(example.pieces):
        if not piece.calls:
            continue
        span = json_span(piece)
        changed = _plainly_changed(piece) if span is None else _changed_json(piece, span)
        for one, may_be_content in changed:
            pieces = [*example.pieces[:at], one, *example.pieces[at + 1 :]]
            rest = range(at, len(pieces)) if may_be_content else ()
            ways = {later: (as_found(pieces[later]), as_text(pieces[later])) for later in rest}
            case = _case(example, pieces, ways)
            yield case if span is None else dataclasses.replace(case, request=untyped)


def _plainly_changed(piece: Piece) -> Iterator[tuple[Piece, bool]]:
    """Yield a piece whose arguments are not JSON with other words as a value."""
    argument = text_argument(piece)
    if argument is None:
        return
    first, *others = piece.calls
    for words in WORDS:
        arguments = json.dumps({**json.loads(first.arguments), argument[0]: words})
        text = piece.text.replace(argument[1], words)
        yield Piece(text, calls=(ExampleCall(first.name, arguments), *others)), False


def _changed_json(piece: Piece, span: tuple[int, int]) -> Iterator[tuple[Piece, bool]]:
    """Yield a piece with other JSON as arguments, and whether it may be content instead: then the
    format's marks stand in a string, or values are deep.
    """
    for written in OBJECTS:
        yield with_arguments(piece, span, written, written), False
    deep = '{"a": ' + "[" * 400 + "]" * 400 + "}"
    yield with_arguments(piece, span, deep, deep), True
    key, _ = text_argument(piece) or ("text", "")
    arguments = json.loads(piece.calls[0].arguments)
    marks = (piece.text[span[1] :], piece.text[: span[0]], piece.text)
    for value in (*JSON_STRINGS, *(f"x{mark}y" for mark in marks)):
        for ascii_only in (False, True):
            if ascii_only or is_encodable(value):
                new = json.dumps({**arguments, key: value}, ensure_ascii=ascii_only)
                yield with_arguments(piece, span, new, new), value not in JSON_STRINGS


def malformed(example: Example) -> Iterator[ParseCase]:
    """Yield the example with a last call whose arguments are no JSON object: it is content."""
    places = [at for at, piece in enumerate(example.pieces) if piece.calls]
    for at in places[-1:]:
        piece = example.pieces[at]
        span = json_span(piece)
        if span is None or len(piece.calls) > 1:
            return
        for written in NOT_OBJECTS:
            one = with_arguments(piece, span, written, "{}")
            pieces = [*example.pieces[:at], one, *example.pieces[at + 1 :]]
            yield _case(example, pieces, {at: (as_text(one),)})
        for written in ('{"a": 1e999}', '{"a": 1%s}' % ("0" * 5000), '{"a": %s' % ("[" * 5000)):
            text = with_arguments(piece, span, written, "{}").text
            before = "".join(one.text for one in example.pieces[:at])
            yield ParseCase(example_request(example), before + text)


def with_other_reasoning(example: Example) -> Iterator[ParseCase]:
    """Yield the example with other texts as reasoning, which may have parts of a closing mark."""
    for at, piece in enumerate(example.pieces):
        if not piece.reasoning or not piece.reasoning.strip():
            continue
        start = piece.text.index(piece.reasoning)
        closing = piece.text[start + len(piece.reasoning) :]
        parts = [closing.strip()[:num] for num in range(1, len(closing.strip()))]
        for body in (*LINES, LONG, *(f"Hm {part} hm." for part in parts)):
            text = piece.text[:start] + body.strip() + closing
            one = Piece(text, reasoning=body.strip())
            yield _case(example, [*example.pieces[:at], one, *example.pieces[at + 1 :]])


def derived(example: Example) -> Iterator[ParseCase]:
    """Yield the example itself and every other text that is derived from it as a whole."""
    yield _case(example, example.pieces)
    for derive in (surrounded, repeated, with_unknown_tools, with_other_values):
        yield from derive(example)
    yield from malformed(example)
    yield from with_other_reasoning(example)
