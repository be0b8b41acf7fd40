"""Cuts the examples of an output format off at each place, and checks what is found."""

from __future__ import annotations

from collections.abc import Sequence

from enginebay.contracts.output_format import Example, OutputFormat, ParseRequest, Piece
from enginebay_testing.output_examples import example_request
from enginebay_testing.output_parses import Way, as_found, as_text, atoms_of, expect_parse

BETWEEN_CALLS = " \t\r\n;,"
"""Characters that may separate two calls of a piece."""

TAIL = " and so on."


def cuts(output_format: OutputFormat, example: Example) -> None:
    """Cut an example off at each place. A piece that is cut is content, or what was found of it:
    the first calls of several, or the beginning of its reasoning.
    """
    request = example_request(example)
    for place, piece in enumerate(example.pieces):
        before = example.pieces[:place]
        if piece.calls:
            _cut_calls(output_format, request, before, piece)
            continue
        for end in range(1, len(piece.text) + 1):
            ways, later = _ways_of_text(piece, end)
            _check(output_format, request, before, piece.text[:end], ways)
            if later:
                _check(output_format, request, before, piece.text[:end] + TAIL, later)


def _check(
    output_format: OutputFormat,
    request: ParseRequest,
    before: Sequence[Piece],
    rest: str,
    ways: Sequence[Way],
) -> None:
    text = "".join(one.text for one in before) + rest
    expect_parse(
        atoms_of(output_format, request, text), [*((as_found(one),) for one in before), ways], text
    )


def _cut_calls(
    output_format: OutputFormat, request: ParseRequest, before: Sequence[Piece], piece: Piece
) -> None:
    """Cut a piece of calls. When some of its calls were found, the text after them is content."""
    start = "".join(one.text for one in before)
    num_before = sum(len(one.calls) for one in before)
    ends: dict[int, int] = {}
    """How much of the piece was read when so many of its calls were found first."""
    for end in range(1, len(piece.text) + 1):
        cut = piece.text[:end]
        atoms = atoms_of(output_format, request, start + cut)
        num_calls = sum(atom[0] == "call" for atom in atoms) - num_before
        rest = piece.text[ends.setdefault(num_calls, end) : end]
        ways: list[Way] = [piece.calls]
        if end < len(piece.text):
            ways += [(("text", cut),)]
            if before and before[-1].calls and not cut.strip(BETWEEN_CALLS):
                ways += [()]
            if 0 < num_calls < len(piece.calls):
                found = piece.calls[:num_calls]
                ways += [(*found, ("text", one)) for one in (rest, rest.lstrip(BETWEEN_CALLS))]
        expect_parse(atoms, [*((as_found(one),) for one in before), ways], start + cut)
        if num_calls == 0:
            _check(output_format, request, before, cut + TAIL, [as_text(Piece(cut + TAIL))])


def _ways_of_text(piece: Piece, end: int) -> tuple[Sequence[Way], Sequence[Way]]:
    """Return the ways of content or reasoning that is cut off, and those when other text follows:
    none where either may be right.
    """
    cut, longer = piece.text[:end], piece.text[:end] + TAIL
    [found] = as_found(piece)
    assert isinstance(found, tuple), "the piece has no calls"
    kind, body = found
    if kind == "text":
        return [(("text", cut),)], []
    if end == len(piece.text):
        return [as_found(piece)], []
    start = piece.text.index(body)
    mark = piece.text[:start].rstrip()
    if end < len(mark):
        return [(("text", cut),)], [(("text", longer),)]
    ways: list[Way] = [((kind, cut[start:]),)]
    if end > start + len(body):
        ways.append(((kind, body),))
    if not mark or not cut[start:].strip():
        ways.append((("text", cut),))
    is_sure = mark and body.strip() and start < end < len(piece.text.rstrip())
    if not body.strip():
        ways += [((kind, cut[at:]),) for at in range(end)]
    return ways, [((kind, longer[start:]),)] if is_sure else []
