"""Shortest job first: short prompts overtake long ones, within a bound on waiting."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from enginebay.contracts.scheduler import Decision, Scheduler, SchedulerView
from enginebay_schedulers.batch import (
    FewSteps,
    MaxWait,
    One,
    first_in_line,
    oldest_first,
    run_batch,
)


class SjfOptions(BaseModel):
    """Options of the scheduler "sjf"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_wait_s: MaxWait = 10.0
    decode_steps_when_waiting: FewSteps = 4


class Sjf(Scheduler):
    """Admits the request with the fewest prompt tokens to compute, by the rules of
    `batch.run_batch`.

    The number of tokens that a request will generate is not known, so only the part of its prompt
    that is not cached counts. Requests that have waited for `max_wait_s` come before all others, in
    order of arrival; under lasting overload this is first come, first served. Running rows are not
    overtaken, and the latest one is preempted first.
    """

    def __init__(self, options: SjfOptions | None = None) -> None:
        self._options = options or SjfOptions()

    def initial_state(self) -> None:
        """Return None: the scheduler keeps no state."""

    def decide(self, view: SchedulerView, state: None) -> tuple[Decision, None]:
        """Return the next decision; the class describes the rules."""
        line = first_in_line(view, lambda one: one.num_left, self._options.max_wait_s)
        order: list[One] = [*oldest_first(view.running), *line]
        return run_batch(view, order, self._options.decode_steps_when_waiting), None
