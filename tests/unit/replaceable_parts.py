"""An LLM whose scheduler and proposer a test can replace while the LLM is idle."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from enginebay import LLM
from enginebay.compose.composition import Composed, Progress, build
from enginebay.compose.plan import Plan
from enginebay.contracts.proposer import Proposer
from enginebay.contracts.scheduler import Decision, RunningView, Scheduler, SchedulerView


class ChangingScheduler(Scheduler):
    """Delegates to `inner`.

    When a test replaces `inner`, the new scheduler starts with its initial state.
    """

    def __init__(self, usual: Scheduler) -> None:
        self.usual = self.inner = usual

    @property
    def needs_cached_tokens(self) -> bool:  # type: ignore[override]
        return self.inner.needs_cached_tokens

    def initial_state(self) -> tuple[Scheduler, Any]:
        return self.inner, self.inner.initial_state()

    def decide(
        self, view: SchedulerView, state: tuple[Scheduler, Any]
    ) -> tuple[Decision, tuple[Scheduler, Any]]:
        last, inner_state = state if state[0] is self.inner else self.initial_state()
        decision, inner_state = last.decide(view, inner_state)
        return decision, (last, inner_state)


class ChangingProposer(Proposer):
    """Delegates to `inner`; proposes no drafts while `inner` is None."""

    def __init__(self, usual: Proposer | None) -> None:
        self.usual = self.inner = usual

    @property
    def looks_far(self) -> bool:  # type: ignore[override]
        return self.inner is not None and self.inner.looks_far

    def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        return np.empty(0, np.int32) if self.inner is None else self.inner.propose(token_ids, most)


class Interrupting(Scheduler):
    """Wraps a scheduler, and preempts each request once, when `when` returns true for its row."""

    def __init__(self, inner: Scheduler, when: Callable[[RunningView], bool]) -> None:
        self.inner, self.when = inner, when
        self.interrupted: list[RunningView] = []

    def initial_state(self) -> frozenset[str]:
        return frozenset()

    def decide(self, view: SchedulerView, state: frozenset[str]) -> tuple[Decision, frozenset[str]]:
        ripe = [row for row in view.running if row.request_id not in state and self.when(row)]
        if ripe:
            self.interrupted += ripe
            names = tuple(row.request_id for row in ripe)
            return Decision(preempt=names), state | {*names}
        return self.inner.decide(view, self.inner.initial_state())[0], state


@dataclasses.dataclass(frozen=True)
class Changing:
    """An LLM, with the scheduler and the proposer that a test can replace."""

    llm: LLM
    scheduler: ChangingScheduler
    proposer: ChangingProposer

    @contextlib.contextmanager
    def interrupted(self, when: Callable[[RunningView], bool]) -> Iterator[Interrupting]:
        """Within the block, the scheduler preempts each request once."""
        self.scheduler.inner = interrupting = Interrupting(self.scheduler.usual, when)
        try:
            yield interrupting
        finally:
            self.scheduler.inner = self.scheduler.usual

    @contextlib.contextmanager
    def drafted(self, proposer: Proposer | None) -> Iterator[None]:
        """Within the block, `proposer` drafts; None means no drafts."""
        self.proposer.inner = proposer
        try:
            yield
        finally:
            self.proposer.inner = self.proposer.usual


@contextlib.contextmanager
def changing(*args: Any, **choices: Any) -> Iterator[Changing]:
    """An LLM of these arguments, closed at the block's end.

    To draft at all, its configuration must name a proposer.
    """
    made: list[Composed] = []

    def compose(plan: Plan, progress: Progress | None = None) -> Composed:
        parts = build(plan, progress)
        proposer = None if parts.proposer is None else ChangingProposer(parts.proposer)
        made.append(
            dataclasses.replace(
                parts, scheduler=ChangingScheduler(parts.scheduler), proposer=proposer
            )
        )
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("enginebay.serving.llm.build", compose)
        llm = LLM(*args, **choices)
    scheduler, proposer = made[0].scheduler, made[0].proposer
    assert isinstance(scheduler, ChangingScheduler)
    with llm:
        yield Changing(
            llm,
            scheduler,
            proposer if isinstance(proposer, ChangingProposer) else ChangingProposer(None),
        )
