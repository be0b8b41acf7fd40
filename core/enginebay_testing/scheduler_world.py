"""A model of the serving loop for schedulers: carries out decisions and checks each one against the
contract.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from typing import Any

from enginebay.scheduler import Decision, Limits, RunningView, Scheduler, SchedulerView, WaitingView

MAX_IDLE_DECISIONS = 50
"""Max number of consecutive decisions that process no token."""


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """An engine as the scheduler sees it. Its cache has rows of fixed size, or one pool in which
    requests grow.

    A pool allocates whole pages, so it may refuse a request that would fit by its number of tokens.
    `num_cache_tokens` is a multiple of `page_size`.
    """

    max_num_seqs: int = 4
    max_num_batched_tokens: int = 32
    max_decode_steps: int = 8
    num_cache_tokens: int = 320
    grows: bool = False
    page_size: int = 1

    @property
    def max_model_len(self) -> int:
        """Return the length of prompt plus output that always fits when a request is alone."""
        return self.num_cache_tokens if self.grows else self.num_cache_tokens // self.max_num_seqs


ROWS = SchedulerLimits()
POOL = SchedulerLimits(num_cache_tokens=120, grows=True)
SETTINGS = {
    "rows": ROWS,
    "pool": POOL,
    "one_row": SchedulerLimits(max_num_seqs=1, num_cache_tokens=80),
    "budget_of_one": SchedulerLimits(max_num_batched_tokens=1, num_cache_tokens=48),
    "many_rows": SchedulerLimits(
        max_num_seqs=64, max_num_batched_tokens=48, num_cache_tokens=64 * 80
    ),
    "tight_pool": SchedulerLimits(
        max_num_seqs=16, num_cache_tokens=90, max_decode_steps=4, grows=True
    ),
    "pages": SchedulerLimits(max_num_seqs=8, num_cache_tokens=128, grows=True, page_size=16),
}


@dataclasses.dataclass(slots=True)
class _Sequence:
    view: WaitingView
    """The request as it waits, or as it waited last."""
    num_done: int = 0
    """Number of prompt tokens that are prefilled."""
    num_tokens: int = 0
    max_new_left: int = 0
    num_promised: int = 0

    @property
    def num_left(self) -> int:
        return self.view.num_prompt_tokens - self.num_done

    @property
    def is_ending(self) -> bool:
        return self.num_left == 0 and self.max_new_left == 0


class World:
    """The serving loop without an engine: requests arrive, decisions are checked and carried out,
    requests end.

    `act()` asks the scheduler for one decision. Every broken rule raises AssertionError with the
    view and the decision. A request that has its last token keeps its row for one more decision,
    until the loop has read that token.
    """

    def __init__(
        self, scheduler: Scheduler, setting: SchedulerLimits, *, seconds_per_decision: float = 0.01
    ) -> None:
        self.scheduler = scheduler
        self.setting = setting
        self.seconds_per_decision = seconds_per_decision
        self.state: Any = scheduler.initial_state()
        self.now_s = 0.0
        self.waiting: dict[str, _Sequence] = {}
        self.running: dict[str, _Sequence] = {}
        self.ended: dict[str, float] = {}
        self.num_decisions = 0
        self._num_idle = 0
        self._num_added = 0

    def add(
        self,
        num_prompt: int,
        max_new: int,
        num_cached: int = 0,
        *,
        priority: int = 0,
        tenant: str = "",
    ) -> str:
        """Add a request; its lengths are cut to what the engine can serve."""
        most = self.setting.max_model_len
        prompt = min(num_prompt, most - 1)
        new = min(max_new, most - prompt)
        name = f"request-{self._num_added}"
        self._num_added += 1
        view = WaitingView(name, prompt, new, self.now_s, priority, min(num_cached, prompt), tenant)
        self.waiting[name] = _Sequence(view)
        return name

    def abort(self, name: str) -> None:
        """Remove a waiting or running request."""
        self.waiting.pop(name, None)
        self.running.pop(name, None)

    def end(self, name: str) -> None:
        """End a running request before max_tokens, as a stop token does."""
        del self.running[name]
        self.ended[name] = self.now_s

    def preempt(self, name: str) -> None:
        """Make a running request wait again, at the head of the queue; its output becomes part of
        the prompt.
        """
        gone = self.running.pop(name)
        if gone.is_ending:
            self.ended[name] = self.now_s
            return
        prompt = max(gone.num_tokens, gone.view.num_prompt_tokens)
        view = dataclasses.replace(
            gone.view,
            num_prompt_tokens=prompt,
            max_new_tokens=gone.max_new_left,
            num_cached_tokens=0,
        )
        self.waiting = {name: _Sequence(view), **self.waiting}

    @property
    def free_tokens(self) -> int:
        """Return the number of cache tokens that no request has reserved."""
        if self.setting.grows:
            return self.setting.num_cache_tokens - sum(
                s.num_promised for s in self.running.values()
            )
        return (self.setting.max_num_seqs - len(self.running)) * self.setting.max_model_len

    def view(self) -> SchedulerView:
        """Return what the scheduler sees."""
        setting = self.setting
        limits = Limits(
            setting.max_num_seqs,
            setting.max_num_batched_tokens,
            setting.max_decode_steps,
            setting.max_num_seqs - len(self.running),
            self.free_tokens,
        )
        running = (
            RunningView(
                name,
                s.num_tokens,
                s.num_left,
                s.max_new_left,
                s.view.arrival_s,
                s.view.priority,
                s.num_promised if setting.grows else None,
                s.view.tenant,
            )
            for name, s in self.running.items()
        )
        waiting = tuple(s.view for s in self.waiting.values())
        return SchedulerView(self.now_s, waiting, tuple(running), limits)

    def act(self) -> Decision:
        """Ask for one decision twice, check it and carry it out."""
        view = self.view()
        before = repr(self.state)
        decision, state = self.scheduler.decide(view, self.state)
        again = self.scheduler.decide(_copied(view), copy.deepcopy(self.state))
        case = _Case(view, before, decision)
        assert repr(self.state) == before, (
            f"decide() changed the state in place to {self.state!r}{case}"
        )
        assert again == (decision, state), (
            f"decide() returned {again[0]} for the same view and state{case}"
        )
        check_state(state, case)
        check_decision(view, decision, case)
        idle = is_empty(decision) and _something_could_run(view)
        assert not idle, f"the decision is empty, although a request could run{case}"
        ending = [name for name, one in self.running.items() if one.is_ending]
        self.state = state
        self.num_decisions += 1
        self.now_s += self.seconds_per_decision
        self._num_idle = 0 if self._carry_out(decision) else self._num_idle + 1
        for name in ending:
            if name in self.running:
                self.end(name)
        check_books(self, case)
        stuck = self._num_idle >= MAX_IDLE_DECISIONS and (self.running or self.waiting)
        assert not stuck, (
            f"no token was processed in {self._num_idle} decisions; the last one:{case}"
        )
        return decision

    def finish(self, max_decisions: int) -> None:
        """Act until no request is left. AssertionError if that takes too long, or if something is
        not released.
        """
        for _ in range(max_decisions):
            if not self.waiting and not self.running:
                break
            self.act()
        left = [*self.running.values(), *self.waiting.values()]
        assert not left, (
            f"after {max_decisions} decisions, these requests have not ended: {left[:4]} "
            f"(view: {self.view()})"
        )
        last = self.act()
        assert is_empty(last), f"no request waits or runs, but the decision is {last}"
        remembered = repr(self.state)
        kept = [f"request-{i}" for i in range(self._num_added) if f"'request-{i}'" in remembered]
        assert not kept, (
            f"the state still holds requests that have ended: {kept[:4]} in {self.state!r}"
        )

    def _carry_out(self, decision: Decision) -> bool:
        """Carry out a decision; return whether any token was processed."""
        for name in decision.preempt:
            self.preempt(name)
        moved = self._decode(decision)  # running rows reserve before admitted requests
        is_open = True
        for name, num in decision.prefill:
            if name in self.waiting:
                is_open = is_open and self._admit(
                    name
                )  # no request is admitted before a refused one
                if not is_open:
                    continue
            one = self.running[name]
            one.num_done += num
            moved = True
            if one.num_left == 0:
                one.num_tokens += 1
                one.max_new_left -= 1
        return moved

    def _decode(self, decision: Decision) -> bool:
        moved = False
        for name in decision.decode:
            one = self.running[name]
            steps = min(decision.decode_steps, one.max_new_left)
            # The last token needs cache space only in the next step. A row without space is
            # skipped.
            if steps and self._promise(one, one.num_tokens - 1 + steps):
                one.num_tokens += steps
                one.max_new_left -= steps
                moved = True
        return moved

    def _admit(self, name: str) -> bool:
        """Admit a waiting request; return whether it got a row. Like the loop, leave it waiting if
        there are too few pages.
        """
        view = self.waiting[name].view
        # Even if the whole prompt is cached, its last token still runs.
        done = min(view.num_cached_tokens, view.num_prompt_tokens - 1)
        one = _Sequence(view, done, view.num_prompt_tokens, view.max_new_tokens)
        if not self._promise(one, view.num_prompt_tokens + 1):
            return False
        del self.waiting[name]
        self.running[name] = one
        return True

    def _promise(self, one: _Sequence, num_tokens: int) -> bool:
        """Reserve cache for `num_tokens` in whole pages; return whether there was room."""
        wanted = -(-num_tokens // self.setting.page_size) * self.setting.page_size
        if self.setting.grows and wanted - one.num_promised > self.free_tokens:
            return False
        one.num_promised = max(one.num_promised, wanted)
        return True


@dataclasses.dataclass(frozen=True, slots=True)
class _Case:
    """The end of a message: formatted only when a check fails, because views are long."""

    view: SchedulerView
    state: str
    decision: Decision

    def __str__(self) -> str:
        return f"\nview: {self.view}\nstate: {self.state}\ndecision: {self.decision}"


_WAITING = operator.attrgetter(*(field.name for field in dataclasses.fields(WaitingView)))
_RUNNING = operator.attrgetter(*(field.name for field in dataclasses.fields(RunningView)))
_LIMITS = operator.attrgetter(*(field.name for field in dataclasses.fields(Limits)))


def _copied(view: SchedulerView) -> SchedulerView:
    """Return an equal view made of new objects; copy.deepcopy takes ten times as long."""
    return SchedulerView(
        view.now_s,
        tuple(WaitingView(*_WAITING(one)) for one in view.waiting),
        tuple(RunningView(*_RUNNING(one)) for one in view.running),
        Limits(*_LIMITS(view.limits)),
    )


def check_books(world: World, case: object) -> None:
    """Raise AssertionError with `case` when more is given out than there is."""
    assert len(world.running) <= world.setting.max_num_seqs, (
        f"more requests run than there are rows{case}"
    )
    assert world.free_tokens >= 0, f"more cache is reserved than there is{case}"
    assert not world.running.keys() & world.waiting.keys(), f"a request both waits and runs{case}"


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
    """Raise AssertionError with `case` when a decision breaks a rule of the contract."""
    waiting = {one.request_id: one for one in view.waiting}
    running = {row.request_id: row for row in view.running}
    prefilled = [name for name, _ in decision.prefill]
    names = [*prefilled, *decision.decode, *decision.preempt]
    assert len(set(names)) == len(names), f"a request occurs twice in the decision{case}"
    assert set(names) <= waiting.keys() | running.keys(), (
        f"the decision names a request that is not in the view{case}"
    )
    assert set(decision.preempt) <= running.keys(), (
        f"the decision preempts a request that does not run{case}"
    )
    assert 1 <= decision.decode_steps <= view.limits.max_decode_steps, (
        f"decode_steps is not between 1 and {view.limits.max_decode_steps}{case}"
    )
    used = sum(num for _, num in decision.prefill) + len(decision.decode)
    assert used <= view.limits.max_num_batched_tokens, (
        f"{used} tokens exceed the budget of {view.limits.max_num_batched_tokens}{case}"
    )
    for name, num in decision.prefill:
        left = (running.get(name) or waiting[name]).num_left
        assert 1 <= num <= left, f"{name} is to prefill {num} tokens, but has {left} left{case}"
    for name in decision.decode:
        ready = name in running and running[name].num_left == 0
        assert ready, f"{name} decodes before its prompt is prefilled{case}"
    admitted = [waiting[name] for name in prefilled if name in waiting]
    assert len(admitted) <= view.limits.free_rows + len(decision.preempt), (
        f"more requests are admitted than there are free rows{case}"
    )
    given_back = [running[name].num_promised for name in decision.preempt]
    if None not in given_back:
        free = view.limits.free_tokens + sum(num or 0 for num in given_back)
        wanted = sum(one.num_prompt_tokens + 1 - one.num_shared_tokens for one in admitted)
        wanted += sum(running[name].growth(decision.decode_steps) for name in decision.decode)
        assert wanted <= free, (
            f"the decision needs {wanted} tokens of cache, but {free} are free{case}"
        )


def _something_could_run(view: SchedulerView) -> bool:
    """Return whether a running row can continue, or, when none runs, the first waiting request can
    be admitted.
    """
    for row in view.running:
        fits = (
            row.num_promised is None or row.num_tokens - row.num_promised <= view.limits.free_tokens
        )
        if row.num_left > 0 or (row.max_new_left > 0 and fits):
            return True
    if view.running or not view.waiting or view.limits.free_rows < 1:
        return False
    return view.waiting[0].num_prompt_tokens + 1 <= view.limits.free_tokens
