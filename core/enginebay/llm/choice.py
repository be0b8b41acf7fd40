"""Choice: the likeliest of the completions that were made, where more are made than returned
(`best_of`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from enginebay.errors import RequestError
from enginebay.outputs import CompletionOutput
from enginebay.types import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """How many completions are returned, and whether they show the log-probabilities that they were
    chosen by.
    """

    num_returned: int
    shows_logprobs: bool

    @staticmethod
    def of(params: SamplingParams) -> Choice | None:
        """What `params` asks for; None when all completions are returned, as they were made."""
        if params.best_of is None or params.best_of == params.n:
            return None
        return Choice(params.n, params.logprobs is not None)

    def order(self, completions: Sequence[CompletionOutput]) -> list[int]:
        """Which are returned, best first: those with the highest mean log-probability of their
        tokens, of equals the first.
        """
        ranked = sorted(range(len(completions)), key=lambda i: -_mean_logprob(completions[i]))
        return ranked[: self.num_returned]

    def returned(self, completions: Sequence[CompletionOutput]) -> list[CompletionOutput]:
        """Those of `order`, with indices from 0 on."""
        chosen = [
            dataclasses.replace(completions[at], index=i)
            for i, at in enumerate(self.order(completions))
        ]
        if self.shows_logprobs:
            return chosen
        return [dataclasses.replace(one, logprobs=None, cumulative_logprob=None) for one in chosen]

    def refuse_stream(self, num_made: int) -> None:
        """RequestError: which of `num_made` are returned is known when all have ended."""
        raise RequestError(
            f"best_of = {num_made} with n = {self.num_returned} in a stream: which are the "
            "best is known at the end",
            f"best_of = None, or {self.num_returned}",
            "Leave it out, or generate.",
        )


def _mean_logprob(completion: CompletionOutput) -> float:
    """Per token; one without tokens comes last."""
    total, num_tokens = completion.cumulative_logprob, len(completion.token_ids)
    return -math.inf if total is None or not num_tokens else total / num_tokens
