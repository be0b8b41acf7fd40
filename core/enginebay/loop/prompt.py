"""Values of one request's prompt, collected from its prefill chunks: log-probabilities, hidden
states.
"""

from __future__ import annotations

import numpy as np

from enginebay.engine import TokenLogprobs
from enginebay.types import Pooling


class PromptLogprobs:
    """The log-probabilities of a prompt of `num_tokens` tokens, each with its `num_best` best
    tokens. The first token has none.

    They are returned once, when all are there. A preempted request computes its incomplete ones
    again.
    """

    def __init__(self, num_tokens: int, num_best: int) -> None:
        self._num_missing = self._num_all = num_tokens - 1
        self._num_best = num_best
        self._parts: list[TokenLogprobs] = []
        self.is_complete = False

    def add(self, logprobs: TokenLogprobs) -> None:
        """Add the log-probabilities of the next chunk, [tokens, W]."""
        self._parts.append(
            TokenLogprobs(
                logprobs.token_ids[:, : self._num_best + 1],
                logprobs.values[:, : self._num_best + 1],
            )
        )
        self._num_missing -= len(logprobs.token_ids)
        self.is_complete = self._num_missing == 0

    def take(self) -> TokenLogprobs | None:
        """All log-probabilities, at the first call after they are complete; otherwise None."""
        if not (self.is_complete and self._parts):
            return None
        parts, self._parts = self._parts, []
        return TokenLogprobs.joined(parts)

    def restart(self) -> None:
        """The request was preempted: discard incomplete log-probabilities, keep complete ones."""
        if not self.is_complete:
            self._parts, self._num_missing = [], self._num_all


class PromptHidden:
    """The pooled final hidden states of a prompt of `num_tokens` tokens: their mean, or the last
    token's.

    The mean adds the sums of the chunks in f64. It starts again when the request is preempted.
    """

    def __init__(self, num_tokens: int, pooling: Pooling) -> None:
        self.pooling, self._num_tokens = pooling, num_tokens
        self.restart()

    def restart(self) -> None:
        """Start again: at the beginning, and when the request was preempted."""
        self._total = np.zeros((), np.float64)
        self._last: np.ndarray | None = None
        self._num_missing = self._num_tokens

    def needs(self, *, last: bool) -> bool:
        """Whether a chunk's hidden states are needed; `last`: it is the prompt's last chunk."""
        return last or self.pooling == "mean"

    def add(self, total: np.ndarray, last: np.ndarray, num_tokens: int) -> None:
        """Add the next chunk: the sum of its hidden states, and its last one, f32 [hidden_size]
        each.
        """
        self._total, self._last = self._total + total.astype(np.float64), last
        self._num_missing -= num_tokens

    def result(self) -> np.ndarray | None:
        """The pooled hidden states, f32 [hidden_size]; None while chunks are missing."""
        if self.pooling == "last" or self._last is None:
            return self._last
        return None if self._num_missing else (self._total / self._num_tokens).astype(np.float32)
