"""PromptLogprobs: those of one request's prompt, collected from the chunks that it is computed in."""

from __future__ import annotations

from enginebay.engine import TokenLogprobs


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
