"""A scheduler without a fault, which runs one request at a time."""

from __future__ import annotations

from enginebay.contracts.scheduler import Decision, Scheduler, SchedulerView


class OneAtATime(Scheduler):
    """Prefills the first waiting request when no request runs, and decodes it to its end."""

    def initial_state(self) -> None:
        """Return None: the scheduler has no state."""

    def decide(self, view: SchedulerView, state: None) -> tuple[Decision, None]:
        """Return the next step of the single request."""
        budget = view.limits.max_num_batched_tokens
        if view.running:
            row = view.running[0]
            if row.num_left:
                return Decision(prefill=((row.request_id, min(row.num_left, budget)),)), None
            return Decision(decode=(row.request_id,)), None
        for one in view.waiting[:1]:
            left = max(1, one.num_prompt_tokens - one.num_cached_tokens)
            return Decision(prefill=((one.request_id, min(left, budget)),)), None
        return Decision(), None
