"""Shortest job first: short prompts overtake long ones, which wait no longer than they must."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from enginebay.scheduler import Decision, Scheduler, SchedulerView
from enginebay_schedulers.batch import (
    FewSteps,
    MaxWait,
    One,
    first_in_line,
    oldest_first,
    run_batch,
)


class SjfOptions(BaseModel):
    """The section of the scheduler "sjf"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_wait_s: MaxWait = 10.0
    decode_steps_when_waiting: FewSteps = 4


class Sjf(Scheduler):
    """Admits the request with the fewest prompt tokens to process, by the rules of
    `batch.run_batch`.

    How much a request will generate is not known, so the prompt alone counts, without what lies in
    the cache. Whoever has waited `max_wait_s` goes before all others, in order of arrival: under
    lasting overload this is first come, first served. Rows that run are not overtaken, and the
    youngest is preempted first. It keeps no state.
    """

    def __init__(self, options: SjfOptions | None = None) -> None:
        self._options = options or SjfOptions()

    def initial_state(self) -> None:
        """None, always."""

    def decide(self, view: SchedulerView, state: None) -> tuple[Decision, None]:
        """The next decision, by the rules of the class."""
        line = first_in_line(view, lambda one: one.num_left, self._options.max_wait_s)
        order: list[One] = [*oldest_first(view.running), *line]
        return run_batch(view, order, self._options.decode_steps_when_waiting), None
