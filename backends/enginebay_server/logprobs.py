"""Log-probabilities in the two formats of OpenAI's API."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

LEAST = -9999.0
"""The log-probability of an impossible token, because JSON has no infinity."""

TokenText = Callable[[int], str]


def chat_logprobs(
    token_ids: Sequence[int], told: Sequence[dict[int, float]], num_best: int, text_of: TokenText
) -> list[dict[str, Any]]:
    """Return the `content` of a chat's logprobs, with `num_best` top tokens per token."""
    found = []
    for token_id, best in zip(token_ids, told, strict=True):
        entry = _entry(token_id, best[token_id], text_of)
        entry["top_logprobs"] = [
            _entry(each, value, text_of) for each, value in _best(best, num_best)
        ]
        found.append(entry)
    return found


class CompletionLogprobs:
    """The logprobs of completions: lists over tokens. Text offsets continue between chunks."""

    def __init__(self, num_best: int, text_of: TokenText, offset: int = 0) -> None:
        """`offset` is the number of characters before the first token."""
        self._num_best = num_best
        self._text_of = text_of
        self._offset = offset

    def record(
        self, token_ids: Iterable[int], told: Sequence[dict[int, float] | None]
    ) -> dict[str, Any]:
        """Return the lists for these tokens; a prompt's first token, without value, has null."""
        tokens, values, tops, offsets = [], [], [], []
        for token_id, best in zip(token_ids, told, strict=True):
            text = self._text_of(token_id)
            tokens.append(text)
            offsets.append(self._offset)
            self._offset += len(text)
            values.append(None if best is None else _finite(best[token_id]))
            tops.append(None if best is None else self._top(token_id, best))
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _top(self, token_id: int, best: dict[int, float]) -> dict[str, float]:
        """Return the top tokens and the chosen token, by their text."""
        top = dict(_best(best, self._num_best)) | {token_id: best[token_id]}
        found: dict[str, float] = {}
        for each, value in top.items():
            found.setdefault(self._text_of(each), _finite(value))
        return found


def _best(told: dict[int, float], num_best: int) -> list[tuple[int, float]]:
    """Return the top tokens, best first. `told` has the same order, and may have one more."""
    return list(told.items())[:num_best]


def _entry(token_id: int, value: float, text_of: TokenText) -> dict[str, Any]:
    text = text_of(token_id)
    return {"token": text, "logprob": _finite(value), "bytes": list(text.encode())}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LEAST
