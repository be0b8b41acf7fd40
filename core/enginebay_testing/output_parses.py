"""Parses texts in pieces, and compares what a parser finds with what an example says."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from enginebay.contracts.output_format import (
    ContentDelta,
    Delta,
    ExampleCall,
    OutputFormat,
    Parser,
    ParseRequest,
    Piece,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallStart,
)

Joined = list[tuple[Any, ...]]
Atom = tuple[str, ...]
"""("content" or "reasoning", text), or ("call", name, arguments)."""

Way = Sequence[tuple[str, str] | ExampleCall]
"""What may be found in a piece: content and reasoning, next to which marks were left out, and
calls. Content of kind "text" stands as it was written.
"""


def parsed(parser: Parser, pieces: Iterable[str]) -> list[Delta]:
    """Return all deltas of a text that comes in these pieces."""
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return [*deltas, *parser.finish()]


def joined(deltas: Iterable[Delta]) -> Joined:
    """Return deltas with consecutive texts of one kind joined, without empty texts and without the
    ids of calls.
    """
    found: Joined = []
    for delta in deltas:
        if isinstance(delta, ToolCallStart):
            found.append((ToolCallStart, delta.index, delta.name))
            continue
        place = None if isinstance(delta, (ContentDelta, ReasoningDelta)) else delta.index
        if found and found[-1][:2] == (type(delta), place):
            found[-1] = (type(delta), place, found[-1][2] + delta.text)
        elif delta.text:
            found.append((type(delta), place, delta.text))
    return found


def deltas_of(
    output_format: OutputFormat, request: ParseRequest, pieces: Sequence[str]
) -> list[Delta]:
    """Return the deltas of a new parser; AssertionError if it raises any error."""
    parser = output_format.make_parser(request)
    assert isinstance(parser, Parser), f"make_parser returned {parser!r}, which is no Parser"
    try:
        return parsed(parser, pieces)
    except Exception as error:
        shown = "".join(pieces)
        raise AssertionError(f"{brief(shown)} raised {type(error).__name__}: {error}") from error


def atoms_of(output_format: OutputFormat, request: ParseRequest, text: str) -> list[Atom]:
    """Return what is found in a whole text, after checking that the deltas are well formed."""
    deltas = deltas_of(output_format, request, [text])
    kinds = (ContentDelta, ReasoningDelta, ToolCallStart, ToolArgumentsDelta)
    strange = [delta for delta in deltas if not isinstance(delta, kinds)]
    assert not strange, f"{brief(text)} gave {strange}, which is no delta of the contract"
    starts = [delta for delta in deltas if isinstance(delta, ToolCallStart)]
    _starts_are_well_formed(starts, text)
    atoms: list[Atom] = []
    found = joined(deltas)
    for place, (kind, index, value) in enumerate(found):
        if kind is ToolCallStart:
            follows = found[place + 1 : place + 2]
            its_kind = follows[0][0] if follows else None
            assert its_kind is ToolArgumentsDelta, f"call {index} of {brief(text)} has no arguments"
            _, its_index, arguments = follows[0]
            assert its_index == index, (
                f"the arguments of call {its_index} follow call {index} in {brief(text)}"
            )
            assert is_object(arguments), (
                f"the arguments {brief(arguments)} of a call in {brief(text)} are no JSON object"
            )
            atoms.append(("call", value, arguments))
        elif kind is not ToolArgumentsDelta:
            atoms.append(("content" if kind is ContentDelta else "reasoning", value))
        else:
            before = found[place - 1][0] if place else None
            assert before is ToolCallStart, f"arguments without a call in {brief(text)}"
    if is_encodable(text):
        halves = [value for _, *values in atoms for value in values if not is_encodable(value)]
        assert not halves, f"{brief(text)} gave {halves[0]!r}, which cannot be sent as UTF-8"
    return atoms


def _starts_are_well_formed(starts: Sequence[ToolCallStart], text: str) -> None:
    numbers, ids = [one.index for one in starts], [one.id for one in starts]
    assert numbers == list(range(len(starts))), f"the calls of {brief(text)} are numbered {numbers}"
    assert all(isinstance(one, str) and one for one in ids), (
        f"the calls of {brief(text)} have the ids {ids}, of which each must be a text"
    )
    assert len(set(ids)) == len(ids), f"calls of {brief(text)} share an id: {ids}"
    assert all(isinstance(one.name, str) and one.name for one in starts), (
        f"a call of {brief(text)} has no name: {starts}"
    )


def is_object(text: str) -> bool:
    """Return whether a text is a JSON object; NaN and Infinity are not JSON."""
    try:
        return isinstance(json.loads(text, parse_constant=_refuse, parse_int=float), dict)
    except ValueError:
        return False
    except RecursionError:  # its brackets are too deep for this module
        return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def canonical(arguments: str) -> str:
    """Return JSON without its spelling: white space and escapes. The order of keys stays."""
    return json.dumps(json.loads(arguments))


def is_encodable(text: str) -> bool:
    """Return whether a text has no half of a UTF-16 pair."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def brief(text: str) -> str:
    """Return a text for a message, without the middle of a long one."""
    return repr(text) if len(text) <= 400 else f"{text[:200]!r}...{text[-100:]!r}"


def as_found(piece: Piece) -> Way:
    """Return what an example says about a piece."""
    if piece.calls:
        return piece.calls
    if piece.reasoning is not None:
        return (("reasoning", piece.reasoning),)
    if piece.content is None or piece.content.strip() == piece.text.strip():
        return as_text(piece)
    return (("content", piece.content),)


def as_text(piece: Piece) -> Way:
    """Return a piece as content, with its marks."""
    return (("text", piece.text),)


def expect_parse(atoms: Sequence[Atom], ways: Sequence[Sequence[Way]], text: str) -> None:
    """Raise AssertionError unless what was found is a way of each piece."""
    for chosen in itertools.product(*ways):
        if _agrees(atoms, [one for way in chosen for one in way]):
            return
    first = [one for way in ways for one in way[0]]
    raise AssertionError(f"{brief(text)} was parsed to {_told(atoms)}, and not to {_told(first)}")


def _told(found: Sequence[Any]) -> str:
    return brief(str(list(found))) if len(str(found)) > 2000 else str(list(found))


def _agrees(atoms: Sequence[Atom], expected: Way) -> bool:
    left = list(atoms)
    groups = itertools.groupby(expected, _kind)
    runs = [(kind, list(members)) for kind, members in groups]
    for place, (kind, members) in enumerate(runs):
        if kind == "call":
            for call in members:
                if not left or not _is_call(left.pop(0), call):
                    return False
            continue
        is_between = (place > 0, place + 1 < len(runs))
        pattern = _pattern([one for one in members if isinstance(one, tuple)], is_between)
        if left and left[0][0] == kind and pattern.fullmatch(left[0][1]):
            left.pop(0)
        elif not pattern.fullmatch(""):
            return False
    return not left


def _kind(one: tuple[str, str] | ExampleCall) -> str:
    if isinstance(one, ExampleCall):
        return "call"
    return "reasoning" if one[0] == "reasoning" else "content"


def _is_call(atom: Atom, call: tuple[str, str] | ExampleCall) -> bool:
    return (
        atom[0] == "call"
        and isinstance(call, ExampleCall)
        and atom[1] == call.name
        and canonical(atom[2]) == canonical(call.arguments)
    )


def _pattern(members: Sequence[tuple[str, str]], is_between: tuple[bool, bool]) -> re.Pattern[str]:
    """Return the pattern of joined texts, where white space next to marks may be left out."""
    whole = ""
    for place, (kind, text) in enumerate(members):
        before = kind != "text" or (place == 0 and is_between[0])
        after = kind != "text" or (place == len(members) - 1 and is_between[1])
        if place and members[place - 1][0] != "text":
            before = True
        if place + 1 < len(members) and members[place + 1][0] != "text":
            after = True
        lead = len(text) - len(text.lstrip()) if before else 0
        body = text[lead:].rstrip() if after else text[lead:]
        trail = len(text) - lead - len(body)
        whole += rf"\s{{0,{lead}}}{re.escape(body)}\s{{0,{trail}}}"
    return re.compile(whole)
