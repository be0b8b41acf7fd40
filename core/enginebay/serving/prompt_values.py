"""Values of one request's prompt, collected from its prefill chunks: log-probabilities, hidden
states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from enginebay.contracts.engine import TokenLogprobs
from enginebay.types import Pooling

Part = TypeVar("Part")


class PromptParts(Generic[Part]):
    """What the chunks of a prompt return, in order, until the first `num_tokens` tokens are there.

    A preempted request computes incomplete parts again.
    """

    def __init__(self, num_tokens: int) -> None:
        self.is_complete = False
        self._num_tokens = num_tokens
        self._parts: list[Part] = []

    def add(self, part: Part, num_tokens: int) -> None:
        """Add the part of the next chunk, which ends after `num_tokens` tokens of the prompt."""
        self._parts.append(part)
        self.is_complete = num_tokens >= self._num_tokens

    def take(self) -> list[Part]:
        """All parts, at the first call after they are complete; otherwise []."""
        if not self.is_complete:
            return []
        parts, self._parts = self._parts, []
        return parts

    def restart(self) -> None:
        """The request was preempted: discard incomplete parts, keep complete ones."""
        if not self.is_complete:
            self._parts = []


def joined_logprobs(parts: Sequence[TokenLogprobs], num_best: int | None) -> TokenLogprobs | None:
    """The log-probabilities [tokens - 1, num_best + 1] of a prompt; None without parts."""
    if not parts or num_best is None:
        return None
    whole = TokenLogprobs.joined(parts)
    return TokenLogprobs(whole.token_ids[:, : num_best + 1], whole.values[:, : num_best + 1])


def pooled_hidden(
    parts: Sequence[tuple[np.ndarray, np.ndarray]], num_tokens: int, pooling: Pooling | None
) -> np.ndarray | None:
    """The pooled final hidden states f32 [hidden_size] of a prompt; None without parts. A part is
    the sum of a chunk's hidden states, and its last one. The sums are added in f64.
    """
    if not parts:
        return None
    if pooling == "last":
        return parts[-1][1]
    total = np.sum([total for total, _ in parts], axis=0, dtype=np.float64)
    pooled: np.ndarray = (total / num_tokens).astype(np.float32)
    return pooled
