"""First come, first served: continuous batching with chunked prefill under a budget of tokens per
decision.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from enginebay.scheduler import Decision, Scheduler, SchedulerView
from enginebay_schedulers.batch import FewSteps, One, oldest_first, run_batch


class FcfsOptions(BaseModel):
    """The section of the scheduler "fcfs"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    decode_steps_when_waiting: FewSteps = 4


class Fcfs(Scheduler):
    """Serves requests in order of arrival, by the rules of `batch.run_batch`; priorities and
    tenants play no part.

    Running rows come first, the oldest before the others, then the waiting ones in the order of the
    view. So no request overtakes another, and the youngest is preempted first. It keeps no state:
    what it needs is in the view.
    """

    def __init__(self, options: FcfsOptions | None = None) -> None:
        self._options = options or FcfsOptions()

    def initial_state(self) -> None:
        """None, always."""

    def decide(self, view: SchedulerView, state: None) -> tuple[Decision, None]:
        """The next decision, by the rules of the class."""
        line = view.waiting[: max(1, view.limits.free_rows)]
        order: list[One] = [*oldest_first(view.running), *line]
        return run_batch(view, order, self._options.decode_steps_when_waiting), None
