"""What is told of one request's prompt, collected from the chunks that it is computed in."""

from __future__ import annotations

import numpy as np

from enginebay.engine import TokenLogprobs
from enginebay.types import Pooling


class PromptLogprobs:
    """Those of a prompt of `num_tokens` tokens, `num_best` besides each one's own. The first token
    has none.

    They are told once, when all are there. What a request has of them when it is preempted is found
    anew.
    """

    def __init__(self, num_tokens: int, num_best: int) -> None:
        self._num_missing = self._num_all = num_tokens - 1
        self._num_best = num_best
        self._parts: list[TokenLogprobs] = []
        self.is_complete = False

    def add(self, told: TokenLogprobs) -> None:
        """Those of the next chunk, [tokens, W]."""
        self._parts.append(
            TokenLogprobs(
                told.token_ids[:, : self._num_best + 1], told.values[:, : self._num_best + 1]
            )
        )
        self._num_missing -= len(told.token_ids)
        self.is_complete = self._num_missing == 0

    def take(self) -> TokenLogprobs | None:
        """All of them, once."""
        if not (self.is_complete and self._parts):
            return None
        parts, self._parts = self._parts, []
        return TokenLogprobs.joined(parts)

    def begin_anew(self) -> None:
        """The request lost its place in the cache; what was complete stays so."""
        if not self.is_complete:
            self._parts, self._num_missing = [], self._num_all


class PromptHidden:
    """The final hidden states of a prompt of `num_tokens` tokens, pooled: their mean, or that of
    the last token.

    A mean adds the sums of the chunks in f64. It begins anew when the request is preempted.
    """

    def __init__(self, num_tokens: int, pooling: Pooling) -> None:
        self.pooling, self._num_tokens = pooling, num_tokens
        self.begin_anew()

    def begin_anew(self) -> None:
        """The request lost its place in the cache."""
        self._total = np.zeros((), np.float64)
        self._last: np.ndarray | None = None
        self._num_missing = self._num_tokens

    def needs(self, *, last: bool) -> bool:
        """Whether a chunk's hidden states are needed; `last`: the prompt ends with it."""
        return last or self.pooling == "mean"

    def add(self, total: np.ndarray, last: np.ndarray, num_tokens: int) -> None:
        """Of the next chunk: the sum of its hidden states and the last one, f32 [hidden_size]."""
        self._total, self._last = self._total + total.astype(np.float64), last
        self._num_missing -= num_tokens

    def result(self) -> np.ndarray | None:
        """f32 [hidden_size]; None while chunks are missing."""
        if self.pooling == "last" or self._last is None:
            return self._last
        return None if self._num_missing else (self._total / self._num_tokens).astype(np.float32)
