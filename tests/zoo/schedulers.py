"""Faulty schedulers: they starve, admit too much, stand still, forget, or remember too much."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from enginebay.scheduler import Decision, RunningView, Scheduler, SchedulerView, WaitingView
from enginebay_schedulers.batch import everybody, oldest_first, run_batch
from enginebay_schedulers.fcfs import Fcfs
from enginebay_testing.schedulers import scheduler_checks
from enginebay_testing.verdicts import Check

Decide = Callable[[SchedulerView, Any], tuple[Decision, Any]]


class Faulty(Scheduler):
    """A scheduler that decides by a function."""

    def __init__(self, decide: Decide, state: Any = ()) -> None:
        self._decide, self._state = decide, state

    def initial_state(self) -> Any:
        return self._state

    def decide(self, view: SchedulerView, state: Any) -> tuple[Decision, Any]:
        return self._decide(view, state)


def ordered(key: Callable[[WaitingView], Any]) -> Decide:
    """Continuous batching that admits waiting requests by a key."""

    def decide(view: SchedulerView, state: Any) -> tuple[Decision, Any]:
        order = [*oldest_first(view.running), *sorted(view.waiting, key=key)]
        return run_batch(view, order, 4), state

    return decide


def with_limits(change: Callable[[Any], dict[str, int]]) -> Decide:
    """First come, first served, by limits that it reads wrongly."""

    def decide(view: SchedulerView, state: Any) -> tuple[Decision, Any]:
        limits = dataclasses.replace(view.limits, **change(view.limits))
        return run_batch(dataclasses.replace(view, limits=limits), everybody(view), 4), state

    return decide


def changed(change: Callable[[SchedulerView, Decision], Decision]) -> Decide:
    """First come, first served, whose decision is changed."""

    def decide(view: SchedulerView, state: Any) -> tuple[Decision, Any]:
        return change(view, run_batch(view, everybody(view), 4)), state

    return decide


def prompts_before_decoding(view: SchedulerView, decision: Decision) -> Decision:
    """Rows decode only while no prompt is left."""
    return (
        dataclasses.replace(decision, decode=()) if decision.prefill or view.waiting else decision
    )


def fills_whole_batches(view: SchedulerView, decision: Decision) -> Decision:
    """Nobody is admitted before all rows can be filled."""
    waiting = {one.request_id for one in view.waiting}
    if len(waiting) >= view.limits.max_num_seqs:
        return decision
    kept = tuple(pair for pair in decision.prefill if pair[0] not in waiting)
    return dataclasses.replace(decision, prefill=kept)


def decodes_before_the_prompt_is_done(view: SchedulerView, decision: Decision) -> Decision:
    """Rows whose prompts are partly prefilled decode, too."""
    named = {name for name, _ in decision.prefill}
    early = [row.request_id for row in view.running if row.num_left and row.request_id not in named]
    return dataclasses.replace(decision, decode=(*decision.decode, *early[:1]))


def prefills_a_token_twice(view: SchedulerView, decision: Decision) -> Decision:
    """One token more than is left of a prompt."""
    return dataclasses.replace(
        decision, prefill=tuple((name, num + 1) for name, num in decision.prefill)
    )


def forgets_cached_prompts(view: SchedulerView, decision: Decision) -> Decision:
    """A prompt that is cached to its end gets nothing to process."""
    whole = {
        one.request_id for one in view.waiting if one.num_cached_tokens >= one.num_prompt_tokens
    }
    kept = tuple(pair for pair in decision.prefill if pair[0] not in whole)
    return dataclasses.replace(decision, prefill=kept)


def remembers(view: SchedulerView, state: Any) -> tuple[Decision, Any]:
    """The state keeps the ids of requests that are gone."""
    names = frozenset(one.request_id for one in everybody(view))
    return run_batch(view, everybody(view), 4), frozenset(state) | names


def keeps_a_list(view: SchedulerView, state: Any) -> tuple[Decision, Any]:
    """The state is a list that it changes."""
    state.append(len(view.waiting))
    return run_batch(view, everybody(view), 4), state


def counting() -> Decide:
    """Decides by a counter of its own, which is in no state."""
    counter = itertools.count()

    def decide(view: SchedulerView, state: Any) -> tuple[Decision, Any]:
        return run_batch(view, everybody(view), 1 + next(counter) % 3), state

    return decide


def longest_line(view: SchedulerView, state: Any) -> tuple[Decision, Any]:
    """Serves the tenant that has most requests."""
    count: dict[str, int] = {}
    for one in view.waiting:
        count[one.tenant] = count.get(one.tenant, 0) + 1
    line = sorted(view.waiting, key=lambda one: -count[one.tenant])
    return run_batch(view, [*oldest_first(view.running), *line], 4), state


def one_step(view: SchedulerView, decision: Decision) -> Decision:
    """A decode of a step too many."""
    return dataclasses.replace(decision, decode_steps=view.limits.max_decode_steps + 1)


def running_only(view: SchedulerView, state: Any) -> tuple[Decision, Any]:
    """Admits nobody while anything runs, so that the rest of the rows are idle: right, but starves
    no one.
    """
    rows: Sequence[RunningView | WaitingView] = view.running or view.waiting
    return run_batch(view, list(rows), 4), state


FAULTS: dict[str, Callable[[], Scheduler]] = {
    "last in, first out, by arrival": lambda: Faulty(ordered(lambda one: -one.arrival_s)),
    "last in, first out, by place": lambda: Faulty(
        lambda view, state: (run_batch(view, [*view.running, *reversed(view.waiting)], 4), state)
    ),
    "longest prompt first": lambda: Faulty(ordered(lambda one: -one.num_prompt_tokens)),
    "longest request first": lambda: Faulty(
        ordered(lambda one: -(one.num_prompt_tokens + one.max_new_tokens))
    ),
    "shortest prompt first": lambda: Faulty(ordered(lambda one: one.num_prompt_tokens)),
    "fewest new tokens first": lambda: Faulty(ordered(lambda one: one.max_new_tokens)),
    "most urgent first": lambda: Faulty(ordered(lambda one: -one.priority)),
    "least urgent first": lambda: Faulty(ordered(lambda one: one.priority)),
    "most cached first": lambda: Faulty(ordered(lambda one: -one.num_cached_tokens)),
    "tenants by name": lambda: Faulty(ordered(lambda one: one.tenant)),
    "largest tenant first": lambda: Faulty(longest_line),
    "prompts before decoding": lambda: Faulty(changed(prompts_before_decoding)),
    "a row too many": lambda: Faulty(
        with_limits(lambda limits: {"free_rows": limits.free_rows + 1})
    ),
    "a token of cache too many": lambda: Faulty(
        with_limits(lambda limits: {"free_tokens": limits.free_tokens + 1})
    ),
    "the whole cache for prompts": lambda: Faulty(
        with_limits(lambda limits: {"free_tokens": limits.free_tokens * 2})
    ),
    "a token of the budget too many": lambda: Faulty(
        with_limits(lambda limits: {"max_num_batched_tokens": limits.max_num_batched_tokens + 1})
    ),
    "a decode step too many": lambda: Faulty(changed(one_step)),
    "waits for a whole batch": lambda: Faulty(changed(fills_whole_batches)),
    "decodes before the prompt is done": lambda: Faulty(changed(decodes_before_the_prompt_is_done)),
    "prefills a token twice": lambda: Faulty(changed(prefills_a_token_twice)),
    "forgets cached prompts": lambda: Faulty(changed(forgets_cached_prompts)),
    "remembers who is gone": lambda: Faulty(remembers, frozenset()),
    "changes its state": lambda: Faulty(keeps_a_list, []),
    "decides by a counter": lambda: Faulty(counting()),
}

RIGHT: dict[str, Callable[[], Scheduler]] = {
    "fcfs": Fcfs,
    "one batch after another": lambda: Faulty(running_only),
}


def checks(part: Callable[[], Scheduler]) -> list[Check]:
    """The kit's suite."""
    return scheduler_checks(part)
