"""Longest cached prefix first: cached prefixes are used before they are evicted."""

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


class PrefixAwareOptions(BaseModel):
    """Options of the scheduler "prefix_aware"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_wait_s: MaxWait = 10.0
    decode_steps_when_waiting: FewSteps = 4


class PrefixAware(Scheduler):
    """Admits the request with the most cached tokens first, by the rules of `batch.run_batch`.

    Ties are served in order of arrival. Requests that have waited for `max_wait_s` come before all
    others, in order of arrival. Running rows are not overtaken, and the latest one is preempted
    first. The order is that of SGLang's longest
    prefix match (Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs",
    NeurIPS 2024), which has no bound on waiting.
    """

    needs_cached_tokens = True

    def __init__(self, options: PrefixAwareOptions | None = None) -> None:
        self._options = options or PrefixAwareOptions()

    def initial_state(self) -> None:
        """Return None: the scheduler keeps no state."""

    def decide(self, view: SchedulerView, state: None) -> tuple[Decision, None]:
        """Return the next decision; the class describes the rules."""
        line = first_in_line(view, lambda one: -one.num_cached_tokens, self._options.max_wait_s)
        order: list[One] = [*oldest_first(view.running), *line]
        return run_batch(view, order, self._options.decode_steps_when_waiting), None
