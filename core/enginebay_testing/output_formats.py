"""Conformance suite of the contract of output formats: however a text is cut into pieces, it is
parsed in the same way; calls and reasoning are found; no text is lost; nothing raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from enginebay.contracts.output_format import (
    Delta,
    Example,
    ModelChat,
    OutputFormat,
    Piece,
)
from enginebay_testing.output_cuts import cuts
from enginebay_testing.output_examples import (
    ParseCase,
    derived,
    example_request,
    is_begun,
    malformed,
    repeated,
    surrounded,
    text_argument,
    with_other_reasoning,
    with_other_values,
    with_unknown_tools,
)
from enginebay_testing.output_parses import (
    Atom,
    atoms_of,
    brief,
    deltas_of,
    expect_parse,
    is_object,
    joined,
)
from enginebay_testing.output_texts import LONG, PLAIN, REQUEST, TEXTS, splits
from enginebay_testing.verdicts import Check

HOW = (
    "Write OutputFormat(examples=[Example([Piece(TEXT), Piece(TEXT, calls=[ExampleCall(NAME, "
    "ARGUMENTS)])])]) with whole answers as a model writes them; see docs/tools.md."
)


def output_format_checks(output_format: OutputFormat) -> list[Check]:
    """Return every check of the suite, by name."""
    checks: tuple[Callable[[OutputFormat], None], ...] = (
        it_is_an_output_format,
        it_brings_examples,
        it_serves_chats_that_show_it,
        text_without_marks_is_content,
        examples_are_parsed_as_they_say,
        calls_are_numbered_and_have_objects_for_arguments,
        text_around_an_example_is_kept,
        an_example_may_come_twice,
        calls_of_unknown_tools_lose_no_text,
        arguments_keep_their_values,
        a_call_that_is_no_json_is_content,
        reasoning_may_be_any_text,
        text_that_is_cut_anywhere_can_be_finished,
        any_split_gives_the_same_parse,
        parsers_do_not_know_of_each_other,
    )
    return [(check.__name__, functools.partial(check, output_format)) for check in checks]


def it_is_an_output_format(output_format: object) -> None:
    """The target is of the contract's class."""
    assert isinstance(output_format, OutputFormat), f"{output_format!r} is no OutputFormat"


def it_brings_examples(output_format: OutputFormat) -> None:
    """The format has examples, which agree with themselves and show what it finds."""
    examples = output_format.examples
    assert examples, f"the format has no examples, so its parser cannot be checked. {HOW}"
    for example in examples:
        assert isinstance(example, Example), f"the example {example!r} is no Example. {HOW}"
        assert example.pieces, f"an example has no pieces. {HOW}"
        for piece in example.pieces:
            _is_whole(piece)
    pieces = [piece for example in examples for piece in example.pieces]
    has_calls = any(piece.calls for piece in pieces)
    has_reasoning = any(piece.reasoning for piece in pieces)
    assert has_calls or has_reasoning, f"no example has a call or reasoning. {HOW}"
    if has_calls:
        assert any(piece.calls and text_argument(piece) for piece in pieces), (
            "no example has a call with an argument of letters alone, such as Paris, which stands "
            "in the text of its piece once. The suite replaces it. Add one."
        )
        assert output_format.has_reasoning == has_reasoning, (
            f"has_reasoning is {output_format.has_reasoning}, and examples with reasoning are "
            f"{'' if has_reasoning else 'not '}given; both or neither must be."
        )


def it_reads_what_is_declared(output_format: OutputFormat, reads: Collection[str]) -> None:
    """The capability `reads` of the declaration is what the examples show."""
    pieces = [piece for example in output_format.examples for piece in example.pieces]
    shown = {"tool_calls" for piece in pieces if piece.calls}
    shown |= {"reasoning" for piece in pieces if piece.reasoning}
    assert set(reads) == shown, (
        f"the declaration reads {', '.join(reads)}, and the examples show "
        f"{', '.join(sorted(shown)) or 'nothing'}; correct one of them."
    )


def _is_whole(piece: object) -> None:
    assert isinstance(piece, Piece), f"{piece!r} in an example is no Piece. {HOW}"
    assert piece.text, f"a piece of an example has no text: {piece!r}"
    kinds = (piece.content is not None, piece.reasoning is not None, bool(piece.calls))
    assert sum(kinds) <= 1, f"{piece!r} has two of content, reasoning and calls; divide it"
    for kind, found in (("content", piece.content), ("reasoning", piece.reasoning)):
        assert (found or "") in piece.text, f"the {kind} {found!r} is not in the text of {piece!r}"
    for call in piece.calls:
        assert is_object(call.arguments), f"the arguments {call.arguments!r} are no JSON object"


def it_serves_chats_that_show_it(output_format: OutputFormat) -> None:
    """serves() returns a bool for any declarations, and False for none."""
    odd = (ModelChat("{% \x00"), ModelChat("", {}), ModelChat("x", {"fields": 3}))
    for chat in (ModelChat(), *odd, *(example.request.chat for example in output_format.examples)):
        found = output_format.serves(chat)
        assert isinstance(found, bool), f"serves({chat!r}) returned {found!r}, which is no bool"
    assert not output_format.serves(ModelChat()), (
        "serves() returned True without a chat template, so auto chooses this format for any model"
    )


def text_without_marks_is_content(output_format: OutputFormat) -> None:
    """Plain texts are content, unchanged, with and without tools."""
    whole = [example_request(one) for one in output_format.examples if not is_begun(one)]
    for request in (REQUEST, *whole[:2]):
        for text in ("", *PLAIN):
            atoms = atoms_of(output_format, request, text)
            expected = [("content", text)] if text else []
            assert atoms == expected, f"{brief(text)} was parsed to {brief(str(atoms))}"
            _is_the_same(output_format, ParseCase(request, text))


def examples_are_parsed_as_they_say(output_format: OutputFormat) -> None:
    """Content, reasoning and calls of an example are found, character by character."""
    for example in output_format.examples:
        atoms = atoms_of(output_format, example_request(example), example.text)
        expected = _atoms_in(example)
        assert atoms == expected, (
            f"the example {brief(example.text)} was parsed to {atoms}, and should be {expected}"
        )


def _atoms_in(example: Example) -> list[Atom]:
    """Return what an example says: content and reasoning joined, and calls."""
    atoms: list[Atom] = []
    for piece in example.pieces:
        atoms += [("call", call.name, call.arguments) for call in piece.calls]
        kind = "content" if piece.reasoning is None else "reasoning"
        text = piece.text if piece.content is None else piece.content
        text = text if piece.reasoning is None else piece.reasoning
        if piece.calls or not text:
            continue
        if atoms and atoms[-1][0] == kind:
            text = atoms.pop()[1] + text
        atoms.append((kind, text))
    return atoms


def calls_are_numbered_and_have_objects_for_arguments(output_format: OutputFormat) -> None:
    """Calls in texts of any format are numbered from 0, and have JSON objects as arguments."""
    for text in TEXTS:
        atoms_of(output_format, REQUEST, text)


def text_around_an_example_is_kept(output_format: OutputFormat) -> None:
    """Text before and behind an example is content, unchanged."""
    _are_explained(output_format, surrounded)


def an_example_may_come_twice(output_format: OutputFormat) -> None:
    """Both examples are found, and the text between them is content."""
    _are_explained(output_format, repeated)


def calls_of_unknown_tools_lose_no_text(output_format: OutputFormat) -> None:
    """A call of a tool that the request does not have is a call or content."""
    _are_explained(output_format, with_unknown_tools)


def arguments_keep_their_values(output_format: OutputFormat) -> None:
    """Arguments have the values that the text has, in the same order, whatever they are."""
    _are_explained(output_format, with_other_values)


def a_call_that_is_no_json_is_content(output_format: OutputFormat) -> None:
    """A call whose arguments are no JSON object is content, with its marks."""
    _are_explained(output_format, malformed)


def reasoning_may_be_any_text(output_format: OutputFormat) -> None:
    """Reasoning is unchanged, with parts of marks in it, too."""
    _are_explained(output_format, with_other_reasoning)


def text_that_is_cut_anywhere_can_be_finished(output_format: OutputFormat) -> None:
    """A text that ends early, or goes on with other text, is parsed without an error. What is not
    complete is content, and reasoning stays reasoning.
    """
    for text in (text for text in (*TEXTS, *PLAIN) if text != LONG):
        step = max(1, len(text) // 100)
        for end in range(0, len(text), step):
            atoms = atoms_of(output_format, REQUEST, text[:end])
            if text in PLAIN:
                expected = [("content", text[:end])] if end else []
                assert atoms == expected, f"{text[:end]!r} was parsed to {atoms}"
    for example in output_format.examples:
        cuts(output_format, example)


def any_split_gives_the_same_parse(output_format: OutputFormat) -> None:
    """Joined, the deltas of a text in pieces are those of the whole text, and the texts that are
    derived from an example are parsed by characters as they are as a whole.
    """
    for text in TEXTS:
        _is_the_same(output_format, ParseCase(REQUEST, text), splits(text, in_pairs=False))
    for example in output_format.examples:
        case = ParseCase(example_request(example), example.text)
        _is_the_same(output_format, case, splits(case.text, in_pairs=True))
    for example in output_format.examples:
        for case in derived(example):
            _is_the_same(output_format, case)


def _is_the_same(
    output_format: OutputFormat, case: ParseCase, pieces: Iterable[Sequence[str]] = ()
) -> None:
    whole = joined(deltas_of(output_format, case.request, [case.text]))
    for split in pieces or (list(case.text),):
        other = joined(deltas_of(output_format, case.request, split))
        assert other == whole, (
            f"{brief(case.text)} was parsed to {brief(str(other))} in the pieces "
            f"{brief(str(split))}, and to {brief(str(whole))} as a whole"
        )


def parsers_do_not_know_of_each_other(output_format: OutputFormat) -> None:
    """Two parsers of a format that receive characters by turns find what they find alone."""
    for first in output_format.examples:
        for second in output_format.examples:
            alone = [
                joined(deltas_of(output_format, example_request(one), [one.text]))
                for one in (first, second)
            ]
            together = [joined(found) for found in _by_turns(output_format, first, second)]
            assert together == alone, (
                f"{brief(first.text)} and {brief(second.text)} were parsed by turns to {together}, "
                f"and alone to {alone}"
            )


def _by_turns(output_format: OutputFormat, *examples: Example) -> Iterator[list[Delta]]:
    parsers = [output_format.make_parser(example_request(one)) for one in examples]
    found: list[list[Delta]] = [[] for _ in parsers]
    for at in range(max(len(one.text) for one in examples)):
        for parser, example, deltas in zip(parsers, examples, found, strict=True):
            deltas += parser.feed(example.text[at : at + 1])
    for parser, deltas in zip(parsers, found, strict=True):
        deltas += parser.finish()
    yield from found


def _are_explained(
    output_format: OutputFormat, derive: Callable[[Example], Iterable[ParseCase]]
) -> None:
    for example in output_format.examples:
        for case in derive(example):
            atoms = atoms_of(output_format, case.request, case.text)
            if case.ways:
                expect_parse(atoms, case.ways, case.text)
