"""Longest cached prefix first: what the cache holds is used before it is thrown out."""

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


class PrefixAwareOptions(BaseModel):
    """The section of the scheduler "prefix_aware"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_wait_s: MaxWait = 10.0
    decode_steps_when_waiting: FewSteps = 4


class PrefixAware(Scheduler):
    """Admits the request of which the most tokens lie in the cache, by the rules of
    `batch.run_batch`.

    Ties, and so all requests where nothing is cached, go in order of arrival. Whoever has waited
    `max_wait_s` goes before all others, in order of arrival too. Rows that run are not overtaken,
    and the youngest is preempted first. It keeps no state. The order is that of SGLang's longest
    prefix match (Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs",
    NeurIPS 2024), which has no bound on waiting.
    """

    needs_cached_tokens = True

    def __init__(self, options: PrefixAwareOptions | None = None) -> None:
        self._options = options or PrefixAwareOptions()

    def initial_state(self) -> None:
        """None, always."""

    def decide(self, view: SchedulerView, state: None) -> tuple[Decision, None]:
        """The next decision, by the rules of the class."""
        line = first_in_line(view, lambda one: -one.num_cached_tokens, self._options.max_wait_s)
        order: list[One] = [*oldest_first(view.running), *line]
        return run_batch(view, order, self._options.decode_steps_when_waiting), None
