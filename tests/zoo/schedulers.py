"""Faulty schedulers: they starve, admit too much, stand still, forget, or remember too much."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from enginebay.contracts.scheduler import (
    Decision,
    RunningView,
    Scheduler,
    SchedulerView,
    WaitingView,
)
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
        line = sorted(view.waiting, key=key)
        order: list[RunningView | WaitingView] = [*oldest_first(view.running), *line]
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


def decodes_a_finished_row(view: SchedulerView, decision: Decision) -> Decision:
    """Every row whose prompt is done decodes, also one that has its last token."""
    kept = [row for row in view.running if row.request_id not in decision.preempt]
    done = tuple(row.request_id for row in kept if row.num_left == 0)
    room = view.limits.max_num_batched_tokens - sum(num for _, num in decision.prefill)
    return dataclasses.replace(decision, decode=done[:room])


def prefills_nothing(view: SchedulerView, decision: Decision) -> Decision:
    """The last prompt of a decision gets no token."""
    pairs = [*decision.prefill[:-1], *((name, 0) for name, _ in decision.prefill[-1:])]
    return dataclasses.replace(decision, prefill=tuple(pairs))


def preempts_what_it_decodes(view: SchedulerView, decision: Decision) -> Decision:
    """The last of several decoding rows is preempted, too."""
    gone = decision.decode[-1:] if len(decision.decode) > 1 else ()
    return dataclasses.replace(decision, preempt=(*decision.preempt, *gone))


def preempts_who_waits(view: SchedulerView, decision: Decision) -> Decision:
    """The last waiting request is preempted."""
    named = {name for name, _ in decision.prefill}
    last = [one.request_id for one in view.waiting[-1:] if one.request_id not in named]
    return dataclasses.replace(decision, preempt=(*decision.preempt, *last))


def decodes_who_waits(view: SchedulerView, decision: Decision) -> Decision:
    """The requests that are admitted decode, and are not prefilled."""
    waiting = {one.request_id for one in view.waiting}
    new = tuple(name for name, _ in decision.prefill if name in waiting)
    kept = tuple(pair for pair in decision.prefill if pair[0] not in waiting)
    return dataclasses.replace(decision, prefill=kept, decode=(*decision.decode, *new))


def decodes_twice(view: SchedulerView, decision: Decision) -> Decision:
    """The first decoding row decodes twice."""
    return dataclasses.replace(decision, decode=(*decision.decode, *decision.decode[:1]))


def decodes_who_is_gone(view: SchedulerView, state: Any) -> tuple[Decision, Any]:
    """Rows that have ended since the decision before decode."""
    decision = run_batch(view, everybody(view), 4)
    present = {row.request_id for row in view.running}
    gone = [name for name in state if name not in present]
    return dataclasses.replace(decision, decode=(*decision.decode, *gone)), tuple(present)


def no_steps(view: SchedulerView, decision: Decision) -> Decision:
    """A decode of no step."""
    return dataclasses.replace(decision, decode_steps=0)


def decodes_beside_the_budget(view: SchedulerView, decision: Decision) -> Decision:
    """Prompts get the whole budget, as if decoding rows took none of it."""
    more = view.limits.max_num_batched_tokens + len(decision.decode)
    limits = dataclasses.replace(view.limits, max_num_batched_tokens=more)
    return run_batch(dataclasses.replace(view, limits=limits), everybody(view), 4)


def every_step(view: SchedulerView, decision: Decision) -> Decision:
    """As many steps as the engine allows, whatever they need of the cache."""
    return dataclasses.replace(decision, decode_steps=view.limits.max_decode_steps)


def every_step_that_fits(view: SchedulerView, decision: Decision) -> Decision:
    """More steps than rows have tokens left, where no row grows: right."""
    is_fixed = all(row.num_promised is None for row in view.running)
    return every_step(view, decision) if is_fixed else decision


def cached_prompts_are_free(view: SchedulerView, state: Any) -> tuple[Decision, Any]:
    """Tokens that are cached need no room, as if they were shared."""
    cheap = [
        dataclasses.replace(one, num_shared_tokens=one.num_cached_tokens) for one in view.waiting
    ]
    return run_batch(view, [*view.running, *cheap], 4), state


def never_preempts(view: SchedulerView, decision: Decision) -> Decision:
    """Rows decode, whether the cache has room or not."""
    return dataclasses.replace(decision, preempt=())


def waits_for_cache(view: SchedulerView, decision: Decision) -> Decision:
    """Nothing runs while the cache is short."""
    return Decision() if decision.preempt else decision


def drops_the_last_row(view: SchedulerView, decision: Decision) -> Decision:
    """The last decoding row does not decode."""
    return dataclasses.replace(decision, decode=decision.decode[:-1])


def preempts_long_prompts(view: SchedulerView, decision: Decision) -> Decision:
    """A prompt that was not prefilled in one decision loses its row."""
    gone = tuple(row.request_id for row in view.running if row.num_left > 0)
    if not gone:
        return decision
    return dataclasses.replace(decision, prefill=(), preempt=gone)


def preempted_last(view: SchedulerView, state: Any) -> tuple[Decision, Any]:
    """Requests that have had a row go behind all others."""
    present = {one.request_id for one in everybody(view)}
    had_rows = {name for name in state if name in present}
    had_rows |= {row.request_id for row in view.running}
    line = sorted(view.waiting, key=lambda one: one.request_id in had_rows)
    return run_batch(view, [*oldest_first(view.running), *line], 4), frozenset(had_rows)


def newest_row_alone(view: SchedulerView, decision: Decision) -> Decision:
    """Only the row that was admitted last decodes."""
    return dataclasses.replace(decision, decode=decision.decode[-1:])


def keeps_its_turn(view: SchedulerView, state: Any) -> tuple[Decision, Any]:
    """The tenant that was served last is served first, while it has requests."""
    line = sorted(view.waiting, key=lambda one: one.tenant != state)
    decision = run_batch(view, [*oldest_first(view.running), *line], 4)
    admitted = dict(decision.prefill).keys()
    served = [one.tenant for one in line if one.request_id in admitted]
    return decision, served[0] if served else state


def new_object(view: SchedulerView, state: Any) -> tuple[Decision, Any]:
    """The state is an object that equals no other."""
    return run_batch(view, everybody(view), 4), object()


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
    "decodes a row that has its last token": lambda: Faulty(changed(decodes_a_finished_row)),
    "prefills no token": lambda: Faulty(changed(prefills_nothing)),
    "preempts and decodes a row": lambda: Faulty(changed(preempts_what_it_decodes)),
    "preempts who waits": lambda: Faulty(changed(preempts_who_waits)),
    "decodes who waits": lambda: Faulty(changed(decodes_who_waits)),
    "decodes a row twice": lambda: Faulty(changed(decodes_twice)),
    "decodes who is gone": lambda: Faulty(decodes_who_is_gone),
    "no decode step": lambda: Faulty(changed(no_steps)),
    "decodes beside the budget": lambda: Faulty(changed(decodes_beside_the_budget)),
    "every decode step": lambda: Faulty(changed(every_step)),
    "cached prompts need no cache": lambda: Faulty(cached_prompts_are_free),
    "never preempts": lambda: Faulty(changed(never_preempts)),
    "waits for cache": lambda: Faulty(changed(waits_for_cache)),
    "drops the last row": lambda: Faulty(changed(drops_the_last_row)),
    "preempts long prompts": lambda: Faulty(changed(preempts_long_prompts)),
    "preempted requests last": lambda: Faulty(preempted_last, frozenset()),
    "newest row alone": lambda: Faulty(changed(newest_row_alone)),
    "a tenant keeps its turn": lambda: Faulty(keeps_its_turn, ""),
    "a new object for a state": lambda: Faulty(new_object),
}

RIGHT: dict[str, Callable[[], Scheduler]] = {
    "fcfs": Fcfs,
    "one batch after another": lambda: Faulty(running_only),
    "every decode step that fits": lambda: Faulty(changed(every_step_that_fits)),
}


def checks(part: Callable[[], Scheduler]) -> list[Check]:
    """The kit's suite."""
    return scheduler_checks(part)
