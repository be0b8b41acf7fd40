"""The bytes that each token adds to a text. The text of one token alone is something else: a token
may be a part of a character, and decoders drop the first space of a text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from enginebay.contracts.text import Tokenizer

Part = Mapping[str, Any]

PROBES = ("a", "▁a", "Ġa", "e", "0")
"""Tokens with a text of their own, before which a token is not the first of a text."""


class TokenBytes:
    """The bytes of the tokens of one tokenizer. Joined, they are the bytes of the text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer.inner, "backend_tokenizer", None)
        kinds = set() if self._backend is None else _decoders(self._backend)
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        self._probe = [] if self._backend is None else _probe(self._backend)
        self._probe_text = self._decode(self._probe)
        self._special = frozenset(_special_ids(self._backend))
        self._known = functools.lru_cache(maxsize=65536)(self._find)

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is left out of texts without special tokens."""
        return token_id in self._special

    def of(self, token_id: int, *, is_first: bool = False) -> bytes:
        """Return the bytes that a token adds to a text; `is_first`: at the beginning of the text.

        A token of an unknown tokenizer has the bytes of its text alone, and an id without a token
        has none.
        """
        return self._known(token_id, is_first)

    def _find(self, token_id: int, is_first: bool) -> bytes:  # noqa: FBT001  # a key of the cache
        token = None if self._backend is None else self._backend.id_to_token(token_id)
        if self._backend is not None and token is None:
            return b""
        if token is not None:
            if self._is_byte_level:
                found = bytes_of_level(token)
                return token.encode() if found is None else found
            if self._has_byte_tokens and (byte := _byte_of(token)) is not None:
                return bytes([byte])
        if is_first or token is None or not self._probe:
            return self._decode([token_id]).encode()
        return self._decode([*self._probe, token_id])[len(self._probe_text) :].encode()

    def of_each(
        self, token_ids: Iterable[int], *, begins_text: bool = False
    ) -> Iterator[tuple[bytes, bool]]:
        """Yield the bytes of each token, and whether it is the first of its text: only special
        tokens come before it. `begins_text` is False for tokens that continue a text.
        """
        for token_id in token_ids:
            yield self.of(token_id, is_first=begins_text), begins_text
            begins_text = begins_text and self.is_special(token_id)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False) if token_ids else ""


def shown_bytes(given: bytes) -> str:
    r"""Return bytes as text; those that are no whole character are written as \xe5."""
    return given.decode(errors="backslashreplace")


def bytes_of_level(token: str) -> bytes | None:
    """Return the bytes of a token in the letters of ByteLevel; None if it has other letters."""
    try:
        return bytes(_LETTERS[letter] for letter in token)
    except KeyError:
        return None


def _letters() -> Mapping[str, int]:
    """Return the byte of each letter of ByteLevel: printable bytes are letters themselves, and the
    others follow one another from 256 on.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }


_LETTERS = _letters()


def _byte_of(token: str) -> int | None:
    """Return the byte of a token such as <0xE5>; None for another token."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def pipeline_of(part: Part | None, name: str) -> list[Part]:
    """Return the parts of a pipeline in a tokenizer.json, which may be one part, or none."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [inner for one in part[name] for inner in pipeline_of(one, name)]


def _decoders(backend: Any) -> set[str]:
    """Return the kinds of the decoders of a tokenizer of the tokenizers library."""
    if backend.decoder is None:
        return set()
    settings = json.loads(backend.decoder.__getstate__())
    return {part["type"] for part in pipeline_of(settings, "decoders")}


def _probe(backend: Any) -> list[int]:
    found = (backend.token_to_id(token) for token in PROBES)
    return next(([token_id] for token_id in found if token_id is not None), [])


def _special_ids(backend: Any) -> Iterable[int]:
    if backend is None:
        return ()
    return [i for i, token in backend.get_added_tokens_decoder().items() if token.special]
