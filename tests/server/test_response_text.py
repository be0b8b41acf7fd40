"""The tokens whose log-probabilities a text of /v1/responses has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from enginebay.contracts.output_format import ContentDelta, Delta, ReasoningDelta
from enginebay.text.token_bytes import TokenBytes
from enginebay_server.parsing.message import MessageParser
from enginebay_server.response_text import LoggedEvent, OutputTextReader

MARK = b"</think>"


class Words(TokenBytes):
    """Tokens with given bytes; the last one is special."""

    def __init__(self, *each: bytes) -> None:
        self._each = each

    def of(self, token_id: int, *, is_first: bool = False) -> bytes:
        return self._each[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id == len(self._each) - 1


class Thinking:
    """Text before a mark is reasoning. White space after the mark is left out, and a text that may
    become the mark is held back.
    """

    def __init__(self) -> None:
        self._text, self._is_over = "", False

    def feed(self, text: str) -> list[Delta]:
        self._text += text
        if self._is_over:
            return self._content()
        before, mark, after = self._text.partition(MARK.decode())
        if not mark:
            if any(self._text.endswith(MARK[:n].decode()) for n in range(1, len(MARK))):
                return []
            self._text = ""
            return [ReasoningDelta(before)] if before else []
        self._text, self._is_over = after.lstrip(), True
        found: list[Delta] = [ReasoningDelta(before)] if before else []
        return found + self._content()

    def _content(self) -> list[Delta]:
        if self._text.endswith("<"):
            return []
        text, self._text = self._text.lstrip("\n"), ""
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[Delta]:
        text, self._text = self._text, ""
        return [ContentDelta(text)] if text else []


def reader_of(words: Words, *, is_thinking: bool, skips_special: bool = True) -> OutputTextReader:
    parser = cast("MessageParser", Thinking()) if is_thinking else None
    return OutputTextReader(parser, words, 0, skips_special=skips_special)


def read(reader: OutputTextReader, *pieces: tuple[str, Sequence[int]]) -> list[LoggedEvent]:
    found = []
    for at, (text, ids) in enumerate(pieces, 1):
        told: list[dict[int, float]] = [{token_id: -0.5} for token_id in ids]
        found += reader.read(text, ids, told, is_last=at == len(pieces))
    return found


def told(reader: OutputTextReader) -> dict[str, list[bytes]]:
    return {b.text: [bytes(e["bytes"]) for e in b.logprobs] for b in reader.blocks.all}


EURO = "€".encode()
WORDS = (b"So", MARK, b"\n\n", b"I", b" <", b" 5", EURO[:1], EURO[1:], b"<end>")
TEXT, IDS = "So</think>\n\nI < 5€", (0, 1, 2, 3, 4, 5, 6, 7, 8)


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_marks_and_space_are_left_out_and_held_text_has_its_tokens(size: int) -> None:
    texts = ("So", "</think>", "\n\n", "I", " <", " 5", "", "€", "")
    reader = reader_of(Words(*WORDS), is_thinking=True)
    starts = range(0, len(IDS), size)
    pieces = [("".join(texts[at : at + size]), IDS[at : at + size]) for at in starts]
    events = read(reader, *pieces)
    assert told(reader) == {
        "So": [],
        "I < 5€": [b"I", b" <", b" 5", EURO[:1], EURO[1:]],
    }
    logged = [entry for _, entries in events for entry in entries]
    assert logged == reader.blocks.all[1].logprobs
    assert all(not entries or event[0] == "add" for event, entries in events)


def test_without_a_parser_every_token_of_the_text_is_in_it() -> None:
    reader = reader_of(Words(*WORDS), is_thinking=False)
    read(reader, (TEXT, IDS))
    assert told(reader) == {TEXT: [*WORDS[:-1]]}
    reader = reader_of(Words(*WORDS), is_thinking=False, skips_special=False)
    read(reader, (f"{TEXT}<end>", IDS))
    assert told(reader) == {f"{TEXT}<end>": [*WORDS]}


def test_a_character_that_is_cut_off_has_its_tokens() -> None:
    reader = reader_of(Words(*WORDS), is_thinking=False)
    read(reader, ("I", (3,)), ("\ufffd", (6,)))
    assert told(reader) == {"I\ufffd": [b"I", EURO[:1]]}
    reader = reader_of(Words(*WORDS), is_thinking=False)
    read(reader, ("I", (3, 6)), ("\ufffd", ()))
    assert told(reader)["I\ufffd"][0] == b"I"
