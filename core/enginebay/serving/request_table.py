"""RequestTable: all unfinished requests, and the views of them that a scheduler gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from enginebay.contracts.engine import Demand
from enginebay.contracts.scheduler import Limits, RunningView, SchedulerView, WaitingView
from enginebay.serving.running import Running

MAX_LOOKED_UP = 256
"""A view counts cached tokens of at most this many waiting requests."""


class RequestTable:
    """All unfinished requests: waiting ones in their order, running ones by id."""

    def __init__(self) -> None:
        self.waiting: dict[str, Running] = {}
        self.running: dict[str, Running] = {}

    def add(self, tracked: Running) -> None:
        """Add a new request at the end of the queue, and begin it."""
        tracked.begin()
        self.waiting[tracked.request.request_id] = tracked

    def find(self, request_id: str) -> Running | None:
        """The unfinished request with this id, or None."""
        return self.running.get(request_id) or self.waiting.get(request_id)

    def drop(self, tracked: Running) -> None:
        """Remove a request that has ended."""
        request_id = tracked.request.request_id
        self.running.pop(request_id, None)
        self.waiting.pop(request_id, None)

    def requeue(self, tracked: Running) -> None:
        """Put a preempted request at the front of the queue. Its output so far is prefilled again
        with the prompt.
        """
        self.running.pop(tracked.request.request_id)
        tracked.lease = None
        tracked.num_prefill = len(tracked.request.prompt_token_ids) + len(tracked.output)
        tracked.num_computed = 0
        tracked.num_launched = len(tracked.output)
        if tracked.prompt is not None:
            tracked.prompt.restart()
        if tracked.hidden is not None:
            tracked.hidden.restart()
        self.waiting = {tracked.request.request_id: tracked} | self.waiting

    def heads(self) -> dict[str, Running]:
        """By parent id, a running completion whose whole prompt was launched: other completions of
        the prompt can share it.
        """
        return {
            t.request.parent_id: t
            for t in self.running.values()
            if t.num_computed >= t.num_prompt and t.request.parent_id
        }

    def begun(self) -> set[str]:
        """Parent ids that have a running completion."""
        return {t.request.parent_id for t in self.running.values() if t.request.parent_id}

    def adapter_counts(self) -> tuple[Counter[str], Counter[str]]:
        """Number of (waiting, running) completions by key of their adapter. Any thread may call
        this.
        """
        each = (list(states.values()) for states in (self.waiting, self.running))
        waiting, running = (Counter(one.request.adapter for one in states) for states in each)
        return waiting, running

    @property
    def can_go_on(self) -> bool:
        """Whether a request waits, or a running one has tokens that were not launched."""
        if self.waiting:
            return True
        for one in self.running.values():
            unlaunched = one.num_total - one.num_prompt - one.num_launched
            if unlaunched > 0 or one.num_computed < one.num_prefill:
                return True
        return False

    @property
    def is_empty(self) -> bool:
        """Whether there is no unfinished request."""
        return not (self.running or self.waiting)

    @property
    def everything(self) -> list[Running]:
        """All requests: running ones, then waiting ones."""
        return [*self.running.values(), *self.waiting.values()]

    def demand(self) -> Demand:
        """The number of unfinished requests, and the most tokens that one of them may need."""
        totals = [t.num_total for each in (self.running, self.waiting) for t in each.values()]
        return Demand(len(totals), max(totals, default=0))

    def view(
        self,
        now_s: float,
        limits: Limits,
        num_cached: Callable[[Running], int] | None = None,
        *,
        forks: bool = False,
    ) -> SchedulerView:
        """The view for a scheduler decision.

        `num_cached` returns how many of a request's first tokens are in the cache. It is called for
        the first MAX_LOOKED_UP waiting requests only, because it hashes each of their pages. With
        `forks`, tokens that another completion of the prompt has computed count as cached too.
        """
        heads = self.heads() if forks and self.waiting else {}

        def shared(one: Running) -> int:
            return one.num_shareable if one.request.parent_id in heads else 0

        def cached(place: int, one: Running) -> int:
            if num_cached is None or place >= MAX_LOOKED_UP or one.needs_every_token:
                return shared(one)
            return max(shared(one), num_cached(one))

        waiting = [
            WaitingView(
                request_id=r,
                num_prompt_tokens=t.num_prefill,
                max_new_tokens=t.num_new_left,
                arrival_s=t.request.arrival_s,
                priority=t.request.priority,
                num_cached_tokens=cached(place, t),
                tenant=t.request.tenant,
                num_shared_tokens=shared(t),
            )
            for place, (r, t) in enumerate(self.waiting.items())
        ]
        running = [
            RunningView(
                request_id=r,
                num_tokens=t.num_tokens,
                num_left=t.num_prefill - t.num_computed,
                max_new_left=t.num_new_left,
                arrival_s=t.request.arrival_s,
                priority=t.request.priority,
                num_promised=t.lease.capacity if t.lease is not None else None,
                tenant=t.request.tenant,
            )
            for r, t in self.running.items()
        ]
        num_streaming = sum([t.request.streams for t in self.running.values()])
        return SchedulerView(now_s, tuple(waiting), tuple(running), limits, num_streaming)
