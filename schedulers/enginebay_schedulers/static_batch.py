"""Static batching: a batch is prefilled and decoded to its end before the next batch begins."""

from __future__ import annotations

import dataclasses

from pydantic import BaseModel, ConfigDict, Field

from enginebay.contracts.scheduler import Decision, Limits, Scheduler, SchedulerView, WaitingView
from enginebay_schedulers.batch import (
    One,
    PromptBudget,
    decodable,
    fill_budget,
    make_room,
    max_steps,
    room_beside,
    steps_that_fit,
)


class StaticBatchOptions(BaseModel):
    """Options of the scheduler "static"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_size: int | None = Field(
        default=None, ge=1, description="max number of requests in a batch; None for all rows"
    )


class StaticBatch(Scheduler):
    """Runs one batch after the other, for offline work and as a baseline for other schedulers.

    - A batch has the first waiting requests, as many as rows, `batch_size` and the cache allow,
      with
      room for all tokens that they may generate. It does not wait for more requests. A row, the
      last one admitted, is preempted only if the cache needs more than was counted, such as whole
      pages.
    - The whole batch is prefilled, in chunks if the token budget requires it, and then decoded.
    - Later requests wait until the last request of the batch has ended.

    The state is the ids of the batch; some of them may not be admitted yet.
    """

    def __init__(self, options: StaticBatchOptions | None = None) -> None:
        self._options = options or StaticBatchOptions()

    def initial_state(self) -> tuple[str, ...]:
        """Return an empty batch."""
        return ()

    def decide(
        self, view: SchedulerView, state: tuple[str, ...]
    ) -> tuple[Decision, tuple[str, ...]]:
        """Return the next decision and the ids of the batch."""
        present = {one.request_id for one in view.waiting} | {
            row.request_id for row in view.running
        }
        batch = tuple(name for name in state if name in present)
        batch += tuple(row.request_id for row in view.running if row.request_id not in batch)
        batch = batch or self._gather(view.waiting, view.limits)
        prefill = _prompts(view, frozenset(batch))
        if prefill:
            return Decision(prefill=prefill), batch
        preempt, kept, free_tokens = make_room(view.running, view.limits)
        decoding = decodable(kept, view.limits)
        steps = min(max_steps(view), max((row.max_new_left for row in decoding), default=1))
        spare = room_beside(kept, dataclasses.replace(view.limits, free_tokens=free_tokens)).tokens
        steps = steps_that_fit(decoding, steps, spare)
        return Decision((), tuple(row.request_id for row in decoding), steps, preempt), batch

    def _gather(self, waiting: tuple[WaitingView, ...], limits: Limits) -> tuple[str, ...]:
        most = min(limits.free_rows, self._options.batch_size or limits.free_rows)
        batch: list[str] = []
        spare = limits.free_tokens
        for one in waiting[: max(0, most)]:
            spare -= one.num_prompt_tokens - one.num_shared_tokens + one.max_new_tokens
            if spare < 0:
                break
            batch.append(one.request_id)
        if not batch and most > 0 and waiting and waiting[0].num_prompt_tokens < limits.free_tokens:
            # Its longest possible answer does not fit, but it may end earlier.
            batch.append(waiting[0].request_id)
        return tuple(batch)


def _prompts(view: SchedulerView, batch: frozenset[str]) -> tuple[tuple[str, int], ...]:
    """Return the prefills of the batch within the budget; rows that have begun come first."""
    todo: list[One] = [*view.running, *(one for one in view.waiting if one.request_id in batch)]
    limits = view.limits
    return fill_budget(
        todo, PromptBudget(limits.free_rows, limits.max_num_batched_tokens, limits.free_tokens)
    )[0]
