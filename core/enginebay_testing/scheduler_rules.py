"""The rules of the scheduler contract for one decision: each broken rule raises AssertionError,
which names the request.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from enginebay.contracts.scheduler import Decision, RunningView, SchedulerView, WaitingView


@dataclasses.dataclass(frozen=True, slots=True)
class DecisionCase:
    """The end of a message: formatted only when a check fails, because views are long. `number`:
    which decision of the run it is, from 0.
    """

    view: SchedulerView
    state: str
    decision: Decision
    number: int = 0

    def __str__(self) -> str:
        return f"\nview: {self.view}\nstate: {self.state}\ndecision {self.number}: {self.decision}"


def tokens(num: int) -> str:
    """Return a number of tokens in words, for messages."""
    return f"{num} token" if num == 1 else f"{num} tokens"


def is_empty(decision: Decision) -> bool:
    """Return whether a decision does nothing, so that the loop waits for new requests."""
    return not decision.prefill and not decision.decode and not decision.preempt


def check_state(state: Any, case: object) -> None:
    """Raise AssertionError with `case` when a state cannot be hashed, as immutable values can."""
    try:
        hash(state)
    except TypeError as error:
        raise AssertionError(f"the state is mutable: {error}{case}") from None


def check_decision(view: SchedulerView, decision: Decision, case: object) -> None:
    """Raise AssertionError with `case` when a decision breaks a rule of the contract.

    The rules about single requests come first: a request that is prefilled too far also exceeds the
    budget, but that is not what is wrong.
    """
    waiting = {one.request_id: one for one in view.waiting}
    running = {row.request_id: row for row in view.running}
    _check_names(decision, waiting, running, case)
    for name, num in decision.prefill:
        left = (running.get(name) or waiting[name]).num_left
        assert num >= 1, f"{name} is to prefill {num} tokens, and not at least 1{case}"
        assert num <= left, f"{name} is to prefill {tokens(num)}, but has {left} left{case}"
    for name in decision.decode:
        reason = _why_no_decode(running.get(name))
        assert reason is None, f"{name} is decoded {reason}{case}"
    _check_once(decision, case)
    _check_limits(view, decision, case)
    _check_cache(view, decision, case)


def who_could_run(view: SchedulerView) -> str | None:
    """Return what an empty decision leaves out: a running row that can continue or, when none runs,
    the first waiting request that can be admitted. None when nothing could run.
    """
    free = view.limits.free_tokens
    for row in view.running:
        if row.num_left > 0:
            return f"{row.request_id} has {tokens(row.num_left)} of its prompt left"
        fits = row.num_promised is None or row.num_tokens - row.num_promised <= free
        if row.max_new_left > 0 and fits:
            return f"{row.request_id} can decode {tokens(row.max_new_left)} more"
    if view.running or not view.waiting or view.limits.free_rows < 1:
        return None
    first = view.waiting[0]
    if first.num_prompt_tokens + 1 > free:
        return None
    return f"nothing runs, and {first.request_id} could be admitted: it is the first in the line"


def _check_names(
    decision: Decision,
    waiting: Mapping[str, WaitingView],
    running: Mapping[str, RunningView],
    case: object,
) -> None:
    names = [*(name for name, _ in decision.prefill), *decision.decode, *decision.preempt]
    unknown = [name for name in names if name not in waiting and name not in running]
    assert not unknown, (
        f"the decision names {', '.join(map(repr, unknown[:4]))}, which the view has not{case}"
    )
    idle = [name for name in decision.preempt if name not in running]
    assert not idle, f"{', '.join(idle[:4])} is preempted, but waits and has no row{case}"


def _why_no_decode(row: RunningView | None) -> str | None:
    if row is None:
        return "before it is admitted: it waits, and its prompt has to be prefilled first"
    if row.num_left > 0:
        return f"before its prompt is prefilled: it has {tokens(row.num_left)} of it left"
    return None if row.max_new_left > 0 else "although it has its last token"


def _check_once(decision: Decision, case: object) -> None:
    """Check that no request occurs twice."""
    verbs: dict[str, list[str]] = {}
    for verb, names in (
        ("preempted", decision.preempt),
        ("prefilled", [name for name, _ in decision.prefill]),
        ("decoded", decision.decode),
    ):
        for name, times in Counter(names).items():
            verbs.setdefault(name, []).append(verb if times == 1 else f"{verb} {times} times")
            twice = times > 1 or len(verbs[name]) > 1
            assert not twice, f"{name} is {' and '.join(verbs[name])} in one decision{case}"


def _check_limits(view: SchedulerView, decision: Decision, case: object) -> None:
    """Check the number of steps, the budget of tokens and the rows."""
    limits = view.limits
    assert 1 <= decision.decode_steps <= limits.max_decode_steps, (
        f"decode_steps is {decision.decode_steps}, not between 1 and {limits.max_decode_steps}"
        f"{case}"
    )
    prefilled, decoded = sum(num for _, num in decision.prefill), len(decision.decode)
    assert prefilled + decoded <= limits.max_num_batched_tokens, (
        f"{prefilled + decoded} tokens ({prefilled} of prompts, and one for each of {decoded} "
        f"decoding rows) exceed the budget of {limits.max_num_batched_tokens}{case}"
    )
    waiting = {one.request_id for one in view.waiting}
    admitted = [name for name, _ in decision.prefill if name in waiting]
    rows = limits.free_rows + len(decision.preempt)
    assert len(admitted) <= rows, (
        f"more requests are admitted than there are free rows: {len(admitted)} "
        f"({', '.join(admitted[:4])}), but {rows} rows are free or preempted{case}"
    )


def _check_cache(view: SchedulerView, decision: Decision, case: object) -> None:
    waiting = {one.request_id: one for one in view.waiting}
    running = {row.request_id: row for row in view.running}
    given_back = [running[name].num_promised for name in decision.preempt]
    if None in given_back:
        return
    free = view.limits.free_tokens + sum(num or 0 for num in given_back)
    needs = {
        f"the prompt of {name} and a token": waiting[name].num_prompt_tokens
        + 1
        - waiting[name].num_shared_tokens
        for name, _ in decision.prefill
        if name in waiting
    }
    needs |= {
        f"{name} for decode_steps = {decision.decode_steps}": running[name].growth(
            decision.decode_steps
        )
        for name in decision.decode
    }
    wanted = sum(needs.values())
    if wanted > free:
        most = sorted(needs, key=lambda what: -needs[what])[:4]
        parts = ", ".join(f"{needs[what]} for {what}" for what in most)
        raise AssertionError(
            f"the decision needs {wanted} tokens of cache ({parts}), but {free} are free{case}"
        )
