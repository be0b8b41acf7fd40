"""A scheduler that admits short prompts first. A long prompt moves forward while it waits, so no
request starves.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from enginebay.contracts.scheduler import (
    Decision,
    Limits,
    RunningView,
    Scheduler,
    SchedulerView,
    WaitingView,
)


class ShortestPromptFirstOptions(BaseModel):
    """Options of this scheduler."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens_per_s: float = Field(
        default=200.0, gt=0, description="prompt tokens that one second of waiting offsets"
    )


class ShortestPromptFirst(Scheduler):
    """Decodes every row that can decode, and admits short prompts before long ones.

    Waiting requests are ordered by arrival_s + num_prompt_tokens / tokens_per_s. So only requests
    that arrive less than n / tokens_per_s seconds later can overtake a prompt of n tokens. No
    request overtakes the first request of this order, so it is admitted when enough cache is free.
    When the decoding rows have too little cache, the latest arrival is preempted and never the
    first, so the first request always makes progress.
    """

    def __init__(self, options: ShortestPromptFirstOptions | None = None) -> None:
        self._options = options or ShortestPromptFirstOptions()

    def initial_state(self) -> None:
        """Return None: the view has everything that the scheduler needs."""

    def decide(self, view: SchedulerView, state: None) -> tuple[Decision, None]:
        """Return the next decision. The class describes its rules."""
        limits = view.limits
        rows, preempted, free_tokens = _make_room(view)
        decode = [row for row in rows if row.num_left == 0 and row.max_new_left > 0][
            : limits.max_num_batched_tokens
        ]
        free_tokens -= sum(_growth(row, 1) for row in decode)
        budget = limits.max_num_batched_tokens - len(decode)
        prefill: list[tuple[str, int]] = []
        for row in sorted((row for row in rows if row.num_left > 0), key=lambda row: row.num_left):
            count = min(row.num_left, budget)
            if count > 0:
                prefill.append((row.request_id, count))
                budget -= count
        if not preempted:
            prefill += self._admit(view.waiting, limits, budget, free_tokens)
        spare = free_tokens - sum(
            w.num_prompt_tokens + 1 for w in view.waiting if w.request_id in dict(prefill)
        )
        steps = _steps(
            decode, limits.max_decode_steps if not view.waiting and not prefill else 1, spare
        )
        return Decision(
            tuple(prefill), tuple(row.request_id for row in decode), steps, preempted
        ), None

    def _admit(
        self, waiting: tuple[WaitingView, ...], limits: Limits, budget: int, free_tokens: int
    ) -> list[tuple[str, int]]:
        rate = self._options.tokens_per_s
        line = sorted(
            waiting, key=lambda w: (w.arrival_s + w.num_prompt_tokens / rate, w.arrival_s)
        )
        admitted: list[tuple[str, int]] = []
        for one in line[: max(0, limits.free_rows)]:
            free_tokens -= one.num_prompt_tokens + 1  # the prompt, and the first token after it
            if budget < 1 or free_tokens < 0:
                break
            count = min(max(1, one.num_prompt_tokens - one.num_cached_tokens), budget)
            admitted.append((one.request_id, count))
            budget -= count
        return admitted


def _growth(row: RunningView, num_steps: int) -> int:
    """Return the tokens of cache that a decoding row needs for `num_steps` steps, beyond what was
    promised to it. The last token needs no slot until it runs.
    """
    if row.num_promised is None:
        return 0
    return max(0, row.num_tokens - 1 + min(num_steps, row.max_new_left) - row.num_promised)


def _make_room(view: SchedulerView) -> tuple[list[RunningView], tuple[str, ...], int]:
    """Return (the rows that stay, by arrival; the ids of preempted rows; the free tokens of cache
    after that). Each row that stays can decode a token.
    """
    rows, preempted, free_tokens = (
        sorted(view.running, key=lambda row: row.arrival_s),
        [],
        view.limits.free_tokens,
    )
    while len(rows) > 1 and sum(_growth(row, 1) for row in rows if row.num_left == 0) > free_tokens:
        latest = rows.pop()
        preempted.append(latest.request_id)
        free_tokens += latest.num_promised or 0
    return rows, tuple(preempted), free_tokens


def _steps(decode: list[RunningView], max_steps: int, spare: int) -> int:
    """Return the largest number of decode steps, at most `max_steps`, whose growth after the first
    step fits into `spare` tokens of cache.
    """
    steps = min(max_steps, max((row.max_new_left for row in decode), default=1))
    first = sum(_growth(row, 1) for row in decode)
    while steps > 1 and sum(_growth(row, steps) for row in decode) - first > spare:
        steps -= 1
    return steps
