"""Special tokens in the texts of users: converts their letters to tokens of ordinary text, where
tokenizers would convert them to the special token.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from enginebay.errors import RequestError, UnsupportedError
from enginebay.text.chat import Chat

Spans = Sequence[tuple[int, int]]
"""Places in a text: the first character of each, and the character after its last."""

_PRIVATE = range(0xF0000, 0x10FFFE)
"""Characters that Unicode leaves to programs."""


class SpecialTexts:
    """Tokenises texts in which some special tokens are ordinary text, with one tokenizer of the
    tokenizers library.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._plain = type(backend).from_str(backend.to_str())
        self._plain.encode_special_tokens = True
        special = {i: t for i, t in backend.get_added_tokens_decoder().items() if t.special}
        self._ids = frozenset(special)
        names = sorted((token.content for token in special.values()), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, names))) if names else None
        self._ids_of = functools.lru_cache(maxsize=1024)(self._ids_of_letters)

    @staticmethod
    def of(inner: Any) -> SpecialTexts:
        """Return that of a tokenizer; UnsupportedError for one of another library."""
        backend = getattr(inner, "backend_tokenizer", None)
        if backend is None:
            raise UnsupportedError(
                f'special_tokens_in_text = "text" with a tokenizer of type {type(inner).__name__}',
                "tokenizers that a tokenizer.json or a GGUF file describes",
                'Set special_tokens_in_text = "parse".',
            )
        return SpecialTexts(backend)

    def encode(self, text: str, spans: Spans | None, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text whose special tokens in `spans` are ordinary text, and
        the text around them is tokenised as if they were there. None: the whole text is ordinary,
        as with split_special_tokens of transformers.
        """
        if spans is None:
            [found] = self._plain.encode_batch([text], add_special_tokens=add_special_tokens)
            return list(found.ids)
        [found] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        starts = {start for start, _ in spans}
        ids: list[int] = []
        for token_id, (start, end) in zip(found.ids, found.offsets, strict=True):
            # Tokens that the tokenizer adds, such as the one that begins a text, are at no place.
            is_text = token_id in self._ids and end > start
            if is_text and not starts.isdisjoint(range(start, end)):
                ids += self._ids_of(text[start:end])
            else:
                ids.append(token_id)
        return ids

    def marked(self, chat: Chat) -> tuple[Chat, Marks]:
        """Return the chat with a mark in place of each special token in a text of its own, and
        the marks.
        """
        if self._pattern is None:
            return chat, NO_MARKS
        try:
            return self._marked(chat, self._pattern)
        except RecursionError:
            given = "messages that are nested too deeply"
            raise RequestError(given, "fewer levels", "Change the messages.") from None

    def _marked(self, chat: Chat, pattern: re.Pattern[str]) -> tuple[Chat, Marks]:
        given = (chat.messages, chat.tools, chat.chat_template_kwargs)
        strings = list(_texts_in(given))
        letters = frozenset("".join(strings))
        mark = next(chr(one) for one in _PRIVATE if chr(one) not in letters)
        found: dict[str, int] = {}

        def mark_of(match: re.Match[str]) -> str:
            return f"{mark}{found.setdefault(match.group(), len(found))}{mark}"

        messages, tools, variables = _with_texts(given, lambda text: pattern.sub(mark_of, text))
        changed = dataclasses.replace(
            chat, messages=messages, tools=tools, chat_template_kwargs=variables
        )
        return changed, Marks(mark, tuple(found))

    def _ids_of_letters(self, text: str) -> list[int]:
        """Return the tokens of a text in the middle of another. Some tokenizers begin every text
        with a space, which here belongs to the line before.
        """

        def plain(text: str) -> list[int]:
            ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
            return ids

        before = plain("\n")
        both = plain("\n" + text)
        return both[len(before) :] if both[: len(before)] == before else plain(text)


@dataclasses.dataclass(frozen=True, slots=True)
class Marks:
    """The marks in a chat: a character that no text of it has, and the special tokens by number."""

    mark: str
    tokens: tuple[str, ...]

    def removed(self, text: str) -> tuple[str, Spans]:
        """Return a rendered text with special tokens in place of their marks, and their places."""
        if not self.tokens:
            return text, ()
        parts, spans, length = [], [], 0
        for number, part in enumerate(re.split(f"{self.mark}([0-9]+){self.mark}", text)):
            if number % 2:
                part = self.tokens[int(part)]
                spans.append((length, length + len(part)))
            parts.append(part)
            length += len(part)
        return "".join(parts), spans


NO_MARKS = Marks("", ())
"""Those of a chat without special tokens in its texts."""


def _texts_in(value: Any) -> Iterator[str]:
    """Yield every text of a JSON value but names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_in(one)


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with `change` applied to each of its texts; names stay as they are."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _with_texts(one, change) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_texts(one, change) for one in value]
    return value
