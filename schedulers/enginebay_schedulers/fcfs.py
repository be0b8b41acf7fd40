"""First come, first served: continuous batching with chunked prefill under a budget of tokens per decision."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from enginebay.scheduler import Decision, RunningView, Scheduler, SchedulerView, WaitingView


class FcfsOptions(BaseModel):
    """The section of the scheduler "fcfs"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    decode_steps_when_waiting: int = Field(
        default=4,
        ge=1,
        description="decode steps per decision while others prefill or could be admitted: "
        "more spread the host's work, fewer let newcomers start sooner",
    )


class Fcfs(Scheduler):
    """Decodes everything that can be decoded, and gives the rest of the budget to prompts in order of arrival.

    - Each decoding row takes one token of the budget. What is left goes to rows that are partly prefilled, then to
      waiting requests in the order of the view; the last one gets a part of its prompt. No request overtakes another.
    - A waiting request is admitted when there are a free row and free cache for its prompt and one token, after what
      the decoding rows need for their next one.
    - When decoding rows need cache and there is not enough, the latest arrival is preempted, and so on until the rest
      fits; the first arrival never is, so there is always progress. Nothing is admitted in such a decision.
    - Four decode steps while others prefill or could be admitted (see FcfsOptions): a newcomer then waits for at most
      that many steps, and the host's work per decision is still shared by four. Otherwise as many as the engine
      allows, but when others wait not beyond the first row that is sure to end.

    It keeps no state: what it needs is in the view.
    """

    def __init__(self, options: FcfsOptions | None = None) -> None:
        self._options = options or FcfsOptions()

    def initial_state(self) -> None:
        """None, always."""

    def decide(self, view: SchedulerView, state: None) -> tuple[Decision, None]:
        """The next decision, by the rules of the class; O(waiting that are admitted + running)."""
        by_arrival = sorted(view.running, key=lambda row: row.arrival_s)
        preempt, kept, free_tokens = _make_room(by_arrival, view.limits.free_tokens)
        decoding = [row for row in kept if row.num_left == 0 and row.max_new_left > 0]
        decoding = decoding[: view.limits.max_num_batched_tokens]
        spare = free_tokens - sum(_growth(row, 1) for row in decoding)
        budget = view.limits.max_num_batched_tokens - len(decoding)

        prefill = _continue_prompts(kept, budget)
        budget -= sum(num for _, num in prefill)
        admitted = () if preempt else _admit(view.waiting, view.limits.free_rows, budget, spare)
        spare -= sum(one.num_prompt_tokens + 1 for one in view.waiting[: len(admitted)])
        prefill += admitted

        unfinished = any(row.num_left > 0 for row in kept)
        can_admit = bool(
            _admit(view.waiting[len(admitted) :], view.limits.free_rows - len(admitted), 1, spare)
        )
        steps = self._decode_steps(view, decoding, hurry=bool(prefill) or unfinished or can_admit)
        steps = _steps_that_fit(decoding, steps, spare)
        return Decision(prefill, tuple(row.request_id for row in decoding), steps, preempt), None

    def _decode_steps(self, view: SchedulerView, decoding: Sequence[RunningView], *, hurry: bool) -> int:
        if not decoding:
            return 1
        most = min(view.limits.max_decode_steps, max(row.max_new_left for row in decoding))
        few = self._options.decode_steps_when_waiting
        if hurry:
            return min(most, few)
        return min(most, max(few, min(row.max_new_left for row in decoding))) if view.waiting else most


def _growth(row: RunningView, num_steps: int) -> int:
    """Tokens of cache to be promised to a decoding row before it can run that many steps.

    The last of its tokens has no place in the cache until it runs.
    """
    if row.num_promised is None:
        return 0
    return max(0, row.num_tokens - 1 + min(num_steps, row.max_new_left) - row.num_promised)


def _make_room(
    by_arrival: Sequence[RunningView], free_tokens: int
) -> tuple[tuple[str, ...], list[RunningView], int]:
    """Who is preempted so that each decoding row can run one step; who is kept; and the free tokens then."""
    kept, preempt = list(by_arrival), []
    while len(kept) > 1:
        needed = sum(_growth(row, 1) for row in kept if row.num_left == 0)
        if needed <= free_tokens:
            break
        latest = kept.pop()
        preempt.append(latest.request_id)
        free_tokens += latest.num_promised or 0
    return tuple(preempt), kept, free_tokens


def _continue_prompts(rows: Sequence[RunningView], budget: int) -> tuple[tuple[str, int], ...]:
    prefill = []
    for row in rows:
        num = min(row.num_left, budget)
        if num > 0:
            prefill.append((row.request_id, num))
            budget -= num
    return tuple(prefill)


def _admit(
    waiting: Sequence[WaitingView], free_rows: int, budget: int, spare: int
) -> tuple[tuple[str, int], ...]:
    """The first of the waiting that there is room for, and how many tokens of their prompts run now."""
    admitted: list[tuple[str, int]] = []
    for one in waiting[: max(0, free_rows)]:
        spare -= one.num_prompt_tokens + 1
        if budget < 1 or spare < 0:
            break
        # Of a prompt that is cached to its end the last token still runs: its logits are the first new token.
        num = min(max(1, one.num_prompt_tokens - one.num_cached_tokens), budget)
        admitted.append((one.request_id, num))
        budget -= num
    return tuple(admitted)


def _steps_that_fit(decoding: Sequence[RunningView], steps: int, spare: int) -> int:
    """The most steps up to `steps` for which the rows' growth beyond the first step fits into `spare` tokens."""
    first = sum(_growth(row, 1) for row in decoding)
    while steps > 1 and sum(_growth(row, steps) for row in decoding) - first > spare:
        steps -= 1
    return steps
