"""Reads the blocks of an answer to /v1/responses from its text and tokens, with the
log-probabilities of the tokens of its text where the request includes them.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from enginebay.contracts.output_format import ContentDelta, Delta
from enginebay.text.token_bytes import TokenBytes
from enginebay_server.blocks import BlockEvent, Blocks
from enginebay_server.logprobs import chat_logprobs
from enginebay_server.parsing.message import MessageParser

LoggedEvent = tuple[BlockEvent, list[dict[str, Any]]]
"""An event of a block, with the log-probabilities of the tokens whose text it adds."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Token:
    """A token whose text no block has yet."""

    entry: dict[str, Any]
    num_chars: int
    has_text: bool
    """False for a special token that the text leaves out."""


class OutputTextReader:
    """Reads one answer, in one piece or in the pieces of a stream."""

    def __init__(
        self,
        parser: MessageParser | None,
        words: TokenBytes,
        num_best: int | None,
        *,
        skips_special: bool,
    ) -> None:
        """`parser` must be new; None makes one text block. `num_best`: the number of top tokens for
        each token, or None for no log-probabilities. `skips_special`: the text is without special
        tokens.
        """
        self.blocks = Blocks()
        self._parser, self._words, self._num_best = parser, words, num_best
        self._skips_special = skips_special
        self._begins_text = True
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._waiting: list[_Token] = []

    def read(
        self,
        text: str,
        token_ids: Sequence[int],
        told: Sequence[dict[int, float]] | None,
        *,
        is_last: bool,
    ) -> list[LoggedEvent]:
        """Add a piece of an answer, and return the events that it causes. `told`: the
        log-probabilities of `token_ids`, best first. `is_last`: no piece follows.
        """
        events: list[LoggedEvent] = []
        if self._num_best is None or not told:
            events += self._take(self._deltas(text))
        else:
            for token, piece in self._tokens(text, token_ids, told, self._num_best):
                self._waiting.append(token)
                events += self._take(self._deltas(piece))
        if is_last and self._parser is not None:
            events += self._take(self._parser.finish())
        return events

    def _deltas(self, text: str) -> list[Delta]:
        if self._parser is not None:
            return self._parser.feed(text)
        return [ContentDelta(text)] if text else []

    def _tokens(
        self, text: str, token_ids: Sequence[int], told: Sequence[dict[int, float]], num_best: int
    ) -> Iterator[tuple[_Token, str]]:
        """Yield the tokens of a piece of text, each with its part of it; the last one has the rest.
        A part of a character has no text, and its last token has the character.
        """
        begins, self._begins_text = self._begins_text, False
        entries = chat_logprobs(token_ids, told, num_best, self._words, begins_text=begins)
        start = 0
        for place, (token_id, entry) in enumerate(zip(token_ids, entries, strict=True), 1):
            has_text = not (self._skips_special and self._words.is_special(token_id))
            size = len(self._decoder.decode(bytes(entry["bytes"]))) if has_text else 0
            end = len(text) if place == len(token_ids) else start + size
            piece, start = text[start:end], end
            yield _Token(entry, len(piece), has_text), piece

    def _take(self, deltas: Iterable[Delta]) -> list[LoggedEvent]:
        events = self.blocks.take(deltas)
        adds = [at for at, (what, block, _) in enumerate(events) if _adds_text(what, block.kind)]
        found: list[LoggedEvent] = [(event, []) for event in events]
        if adds:
            entries = self._last_tokens(sum(len(events[at][2]) for at in adds))
            events[adds[-1]][1].logprobs += entries
            found[adds[-1]] = (events[adds[-1]], entries)
        if events:
            self._waiting.clear()
        return found

    def _last_tokens(self, num_chars: int) -> list[dict[str, Any]]:
        """The entries of the last tokens that together have as many characters: before them may be
        the marks of a block that has ended, which are no text.
        """
        tokens, missing = list(self._waiting), num_chars
        found = []
        while tokens and (missing > 0 or (tokens[-1].has_text and not tokens[-1].num_chars)):
            token = tokens.pop()
            missing -= token.num_chars
            found.append(token.entry)
        return found[::-1]


def _adds_text(what: str, kind: str) -> bool:
    return what == "add" and kind == "text"
