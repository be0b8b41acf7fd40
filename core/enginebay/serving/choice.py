"""BestOf: selects the likeliest completions of a request that makes more than it returns
(`best_of`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from enginebay.outputs import CompletionOutput
from enginebay.types import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class BestOf:
    """How many completions are returned, and whether they include the log-probabilities that the
    choice needed.
    """

    num_returned: int
    shows_logprobs: bool

    @staticmethod
    def of(params: SamplingParams) -> BestOf | None:
        """The choice that `params` request; None when all completions are returned, in the order in
        which they were made.
        """
        if params.best_of is None or params.best_of == params.n:
            return None
        return BestOf(params.n, params.logprobs is not None)

    def order(self, completions: Sequence[CompletionOutput]) -> list[int]:
        """Indices of the completions to return, best first: by the mean log-probability of their
        tokens. Of equal completions the one with the smaller index comes first.
        """
        ranked = sorted(range(len(completions)), key=lambda i: -_mean_logprob(completions[i]))
        return ranked[: self.num_returned]

    def returned(self, completions: Sequence[CompletionOutput]) -> list[CompletionOutput]:
        """The completions of `order`, renumbered from 0."""
        chosen = [
            dataclasses.replace(completions[at], index=i)
            for i, at in enumerate(self.order(completions))
        ]
        if self.shows_logprobs:
            return chosen
        return [dataclasses.replace(one, logprobs=None, cumulative_logprob=None) for one in chosen]


def _mean_logprob(completion: CompletionOutput) -> float:
    """The mean per token; -inf for a completion without tokens, so that it comes last."""
    total, num_tokens = completion.cumulative_logprob, len(completion.token_ids)
    return -math.inf if total is None or not num_tokens else total / num_tokens
