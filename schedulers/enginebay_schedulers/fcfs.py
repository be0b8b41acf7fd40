"""First come, first served: continuous batching with chunked prefill and a token budget per
decision.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from enginebay.contracts.scheduler import Decision, Scheduler, SchedulerView
from enginebay_schedulers.batch import FewSteps, One, oldest_first, run_batch


class FcfsOptions(BaseModel):
    """Options of the scheduler "fcfs"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    decode_steps_when_waiting: FewSteps = 4


class Fcfs(Scheduler):
    """Serves requests in order of arrival, by the rules of `batch.run_batch`.

    It ignores priorities and tenants. Running rows come first, by arrival, then waiting requests in
    the order of the view. No request overtakes another, and the latest one is preempted first.
    """

    def __init__(self, options: FcfsOptions | None = None) -> None:
        self._options = options or FcfsOptions()

    def initial_state(self) -> None:
        """Return None: the scheduler keeps no state."""

    def decide(self, view: SchedulerView, state: None) -> tuple[Decision, None]:
        """Return the next decision; the class describes the rules."""
        line = view.waiting[: max(1, view.limits.free_rows)]
        order: list[One] = [*oldest_first(view.running), *line]
        return run_batch(view, order, self._options.decode_steps_when_waiting), None
