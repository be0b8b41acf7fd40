"""InFlight: a launched step that was not yet read, with the requests of its rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from enginebay.contracts.engine import Pending, StepPlan, TokenLogprobs
from enginebay.serving.running import Running


@dataclasses.dataclass(slots=True)
class InFlight:
    """A launched step and the requests of its rows, in the plan's order. `launched_s` is nan when
    there was no observer at its launch.
    """

    pending: Pending
    plan: StepPlan
    rows: list[Running]
    launched_s: float = math.nan

    def take_prompts(self) -> list[int]:
        """Of a prefill: pass log-probabilities and hidden states of prompts to the requests that
        asked for them. Returns the rows whose hidden states have NaN or infinity.
        """
        failed: list[int] = []
        for row, (plan, tracked) in enumerate(zip(self.plan.rows, self.rows, strict=True)):
            if tracked.finished:
                continue
            end = plan.num_computed + plan.num_tokens
            if plan.returns_prompt and tracked.prompt is not None:
                tracked.prompt.add(self.pending.read_prompt_logprobs(row), end)
            if end >= tracked.num_prompt and not tracked.request.generates:
                tracked.is_scored = True
            if plan.pools and tracked.hidden is not None:
                hidden = self.pending.read_hidden(row)
                if not all(np.isfinite(vector).all() for vector in hidden):
                    failed.append(row)
                tracked.hidden.add(hidden, end)
        return failed

    def logprobs(self, tokens: np.ndarray, counts: Sequence[int]) -> list[TokenLogprobs | None]:
        """The log-probabilities that each request asked for, of its row's first counts[i]
        tokens.
        """
        asked = [
            None if t.finished or not count else t.num_logprobs
            for t, count in zip(self.rows, counts, strict=True)
        ]
        logprobs = self.pending.read_logprobs()

        def of_row(row: int, num_best: int) -> TokenLogprobs:
            if not self.rows[row].request.sampling.returns_all:
                return logprobs.of_row(row, counts[row], num_best)
            own = tokens[row, : counts[row]]
            return TokenLogprobs.of_all(own, self.pending.read_all_logprobs(row)[: len(own)])

        return [
            None if num_best is None else of_row(row, num_best)
            for row, num_best in enumerate(asked)
        ]
