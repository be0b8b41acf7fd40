"""Log-probabilities in the two formats of OpenAI's API."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Sequence
from typing import Any

from enginebay.text.token_bytes import TokenBytes, shown_bytes

LEAST = -9999.0
"""The log-probability of an impossible token, because JSON has no infinity."""


def chat_logprobs(
    token_ids: Sequence[int],
    told: Sequence[dict[int, float]],
    num_best: int,
    words: TokenBytes,
    *,
    begins_text: bool = False,
) -> list[dict[str, Any]]:
    r"""Return the `content` of a chat's logprobs, with `num_best` top tokens per token.

    `bytes` are the token's own, and `token` their text, where a byte within a character is written
    as \xe5. `begins_text`: the first token is the first of the text.
    """
    each = words.of_each(token_ids, begins_text=begins_text)
    found = []
    for token_id, best, (own, is_first) in zip(token_ids, told, each, strict=True):
        entry = _entry(own, best[token_id])
        entry["top_logprobs"] = [
            _entry(words.of(each_id, is_first=is_first), value)
            for each_id, value in _best(best, num_best)
        ]
        found.append(entry)
    return found


class CompletionLogprobs:
    """The logprobs of completions: lists over tokens. Text offsets continue between chunks."""

    def __init__(
        self,
        num_best: int,
        words: TokenBytes,
        *,
        begins_text: bool = False,
        skips_special: bool = True,
    ) -> None:
        """`begins_text`: the first token is the first of its text, as with `echo`. `skips_special`:
        the text is without special tokens, which then take no place in it.
        """
        self._num_best = num_best
        self._words = words
        self._begins_text = begins_text
        self._skips_special = skips_special
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def record(
        self, token_ids: Iterable[int], told: Sequence[dict[int, float] | None]
    ) -> dict[str, Any]:
        r"""Return the lists for these tokens; a prompt's first token, without value, has null.

        A token that is not whole characters is written as bytes:\xe5. Its offset is that of the
        first character that it is a part of.
        """
        ids = list(token_ids)
        tokens, values, tops, offsets = [], [], [], []
        each = list(self._words.of_each(ids, begins_text=self._begins_text))
        for token_id, best, (own, is_first) in zip(ids, told, each, strict=True):
            tokens.append(_key(own))
            offsets.append(self._offset)
            if not (self._skips_special and self._words.is_special(token_id)):
                self._offset += len(self._decoder.decode(own))
                self._begins_text = False
            values.append(None if best is None else _finite(best[token_id]))
            tops.append(None if best is None else self._top(token_id, best, is_first=is_first))
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _top(self, token_id: int, best: dict[int, float], *, is_first: bool) -> dict[str, float]:
        """Return the top tokens and the chosen token, by their text. A token whose text is already
        there is written as token_id:7.
        """
        top = dict(_best(best, self._num_best)) | {token_id: best[token_id]}
        found: dict[str, float] = {}
        for each, value in top.items():
            key = _key(self._words.of(each, is_first=is_first))
            found[f"token_id:{each}" if key in found else key] = _finite(value)
        return found


def _key(own: bytes) -> str:
    text = shown_bytes(own)
    return text if text.encode() == own else f"bytes:{text}"


def _best(told: dict[int, float], num_best: int) -> list[tuple[int, float]]:
    """Return the top tokens, best first. `told` has the same order, and may have one more."""
    return list(told.items())[:num_best]


def _entry(own: bytes, value: float) -> dict[str, Any]:
    return {"token": shown_bytes(own), "logprob": _finite(value), "bytes": list(own)}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LEAST
