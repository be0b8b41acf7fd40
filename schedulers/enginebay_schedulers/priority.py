"""Priority: the most urgent request first; waiting makes a request more urgent."""

from __future__ import annotations

import bisect
import dataclasses
import heapq

from pydantic import BaseModel, ConfigDict, Field

from enginebay.contracts.scheduler import (
    Decision,
    RunningView,
    Scheduler,
    SchedulerView,
    WaitingView,
)
from enginebay_schedulers.batch import (
    FewSteps,
    One,
    has_room,
    is_ending,
    room_beside,
    run_batch,
    without,
)


class PriorityOptions(BaseModel):
    """Options of the scheduler "priority"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ageing_s: float = Field(
        default=10.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds of waiting that equal one level of priority",
    )
    displace: bool = Field(
        default=True,
        description="a waiting request takes the row of a less urgent one when there is no room "
        "for it",
    )
    decode_steps_when_waiting: FewSteps = 4


class Priority(Scheduler):
    """Serves the most urgent request first, running or waiting, by the rules of `batch.run_batch`.

    - A larger priority is more urgent. Requests are ordered by arrival_s - priority * ageing_s.
      Requests of one priority are served in order of arrival. A request with a priority that is n
      levels higher overtakes only if it arrives less than n * `ageing_s` later, so no request
      starves. The order of two requests never changes, so they do not displace each other in turn.
    - The last request of the order is preempted first when decoding rows need cache.
    - With `displace`, rows with a lower priority than the first waiting request, and after it in
      the
      order, are preempted if that makes enough room for it.
    """

    def __init__(self, options: PriorityOptions | None = None) -> None:
        self._options = options or PriorityOptions()

    def initial_state(self) -> None:
        """Return None: the scheduler keeps no state."""

    def decide(self, view: SchedulerView, state: None) -> tuple[Decision, None]:
        """Return the next decision; the class describes the rules."""
        rows = sorted(view.running, key=self._rank)
        line = heapq.nsmallest(view.limits.max_num_seqs, view.waiting, key=self._rank)
        displaced = self._displaced(view, rows, line[0]) if line and self._options.displace else ()
        both: list[One] = [*rows, *line]
        order = sorted((one for one in both if one.request_id not in displaced), key=self._rank)
        decision = run_batch(
            without(view, displaced), order, self._options.decode_steps_when_waiting
        )
        return dataclasses.replace(decision, preempt=displaced + decision.preempt), None

    def _rank(self, one: One) -> tuple[float, float]:
        return one.arrival_s - one.priority * self._options.ageing_s, one.arrival_s

    def _displaced(
        self, view: SchedulerView, rows: list[RunningView], first: WaitingView
    ) -> tuple[str, ...]:
        """Return the fewest rows from the end of the order that make room for `first`.

        Returns no row if all of them do not make enough room.
        """
        # ending rows free their cache anyway
        ending = {row.request_id for row in rows if is_ending(row)}
        lower = [
            r for r in rows if r.priority < first.priority and self._rank(r) > self._rank(first)
        ]
        names = tuple(row.request_id for row in reversed(lower) if row.request_id not in ending)

        def is_enough(num: int) -> bool:
            rest = without(view, ending.union(names[:num]))
            return has_room(first, room_beside(rest.running, rest.limits))

        num = bisect.bisect_left(range(len(names) + 1), True, key=is_enough)
        return names[:num] if num <= len(names) else ()
