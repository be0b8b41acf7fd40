"""Fairness between tenants: the tenant with the least service is served first, however many
requests other tenants queue.
"""

from __future__ import annotations

import heapq

from pydantic import BaseModel, ConfigDict, Field

from enginebay.contracts.scheduler import (
    Decision,
    RunningView,
    Scheduler,
    SchedulerView,
    WaitingView,
)
from enginebay_schedulers.batch import FewSteps, MaxWait, One, run_batch
from enginebay_schedulers.counters import Counters, TokenWeights, charge, settle


class FairOptions(BaseModel):
    """Options of the scheduler "fair"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input_weight: float = Field(
        default=1.0,
        ge=0,
        allow_inf_nan=False,
        description="cost of a prompt token",
    )
    output_weight: float = Field(
        default=2.0, gt=0, allow_inf_nan=False, description="cost of a generated token"
    )
    max_wait_s: MaxWait = 30.0
    decode_steps_when_waiting: FewSteps = 4


class Fair(Scheduler):
    """Admits a request of the tenant with the lowest virtual token counter, by the rules of
    `batch.run_batch`.

    - A prompt token costs `input_weight`, a generated token `output_weight`; `counters` describes
      the rules. The requests of one tenant are served in order of arrival, so many requests of one
      tenant delay that tenant only.
    - New tenants start at the smallest counter of the waiting ones. Many new tenants could
      therefore starve an old one. To prevent this, a tenant with waiting requests of which none was
      admitted for `max_wait_s` is served first, once; the longest waiting tenant before the others.
    - When decoding rows need cache, the latest row of the tenant with the highest counter is
      preempted first. The oldest row is never preempted, so that every row finishes.

    The counters are the state.
    """

    def __init__(self, options: FairOptions | None = None) -> None:
        self._options = options or FairOptions()
        self._weights = TokenWeights(self._options.input_weight, self._options.output_weight)

    def initial_state(self) -> Counters:
        """Return counters without tenants."""
        return Counters()

    def decide(self, view: SchedulerView, state: Counters) -> tuple[Decision, Counters]:
        """Return the next decision and the counters after it; the class describes the rules."""
        settled = settle(view, state, self._weights, self._options.max_wait_s)
        order: list[One] = [*_rows(view, settled), *self._line(view, settled)]
        decision = run_batch(view, order, self._options.decode_steps_when_waiting)
        return decision, charge(view, decision, settled, self._weights)

    def _line(self, view: SchedulerView, counters: Counters) -> list[WaitingView]:
        """Return as many waiting requests as free rows, each of the tenant that is next."""
        queues: dict[str, list[WaitingView]] = {}
        for one in reversed(view.waiting):
            queues.setdefault(one.tenant, []).append(one)
        turns: list[tuple[bool, float, float, str]] = []
        for account in counters.accounts:
            if account.tenant in queues:
                arrival_s = queues[account.tenant][-1].arrival_s
                since_s = max(arrival_s, account.admitted_s)
                late = view.now_s - since_s >= self._options.max_wait_s
                turns.append(
                    (not late, since_s if late else account.counter, arrival_s, account.tenant)
                )
        heapq.heapify(turns)
        levels = {account.tenant: account.counter for account in counters.accounts}
        paid = {name for name, _ in counters.paid}
        line: list[WaitingView] = []
        while turns and len(line) < max(1, view.limits.free_rows):
            tenant = heapq.heappop(turns)[-1]
            one = queues[tenant].pop()
            line.append(one)
            prompt = 0.0 if one.request_id in paid else self._weights.input * one.num_left
            levels[tenant] += prompt + self._weights.output
            if queues[tenant]:
                heapq.heappush(turns, (True, levels[tenant], queues[tenant][-1].arrival_s, tenant))
        return line


def _rows(view: SchedulerView, counters: Counters) -> list[RunningView]:
    """Return running requests: the oldest one, then by the tenant's counter, then by arrival."""
    levels = {account.tenant: account.counter for account in counters.accounts}
    oldest = min(view.running, key=lambda row: row.arrival_s, default=None)
    return sorted(
        view.running, key=lambda row: (row is not oldest, levels[row.tenant], row.arrival_s)
    )
