"""Shortest prompt first: a scheduler in which waiting makes up for length, so that nobody
starves.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from enginebay.scheduler import Decision, Limits, RunningView, Scheduler, SchedulerView, WaitingView


class ShortestPromptFirstOptions(BaseModel):
    """The section of this scheduler."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens_per_s: float = Field(
        default=200.0, gt=0, description="prompt tokens that one second of waiting makes up for"
    )


class ShortestPromptFirst(Scheduler):
    """Decodes everything that can be decoded, and admits short prompts before long ones.

    Waiting requests are ordered by arrival_s + num_prompt_tokens / tokens_per_s. So a prompt of n
    tokens is overtaken only by requests that come less than n / tokens_per_s seconds after it,
    which are finitely many; and as nothing goes past the first of that order, room is made for it
    in the end. When decoding rows run out of cache the latest arrival is preempted, never the
    first, so there is always progress.
    """

    def __init__(self, options: ShortestPromptFirstOptions | None = None) -> None:
        self._options = options or ShortestPromptFirstOptions()

    def initial_state(self) -> None:
        """None: all it needs is in the view."""

    def decide(self, view: SchedulerView, state: None) -> tuple[Decision, None]:
        """The next decision, by the rules of the class."""
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
    """Cache to be promised to a decoding row for that many steps; its last token needs no place
    until it runs.
    """
    if row.num_promised is None:
        return 0
    return max(0, row.num_tokens - 1 + min(num_steps, row.max_new_left) - row.num_promised)


def _make_room(view: SchedulerView) -> tuple[list[RunningView], tuple[str, ...], int]:
    """The rows that stay, by arrival; those preempted so that each of them can decode a token; free
    cache then.
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


def _steps(decode: list[RunningView], most: int, spare: int) -> int:
    """The most decode steps up to `most` whose growth beyond the first step fits `spare` tokens of
    cache.
    """
    steps = min(most, max((row.max_new_left for row in decode), default=1))
    first = sum(_growth(row, 1) for row in decode)
    while steps > 1 and sum(_growth(row, steps) for row in decode) - first > spare:
        steps -= 1
    return steps
