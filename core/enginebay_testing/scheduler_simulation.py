"""A model of the serving loop for schedulers: carries out decisions and checks each one against the
contract.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from typing import Any

from enginebay.contracts.scheduler import (
    Decision,
    Limits,
    RunningView,
    Scheduler,
    SchedulerView,
    WaitingView,
)
from enginebay_testing.scheduler_rules import (
    DecisionCase,
    check_decision,
    check_state,
    is_empty,
    tokens,
    who_could_run,
)

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


@dataclasses.dataclass(slots=True)
class _History:
    """The numbers of the decisions in which a request was admitted and preempted."""

    admitted: list[int] = dataclasses.field(default_factory=list)
    preempted: list[int] = dataclasses.field(default_factory=list)


class LoopSimulation:
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
        self._histories: dict[str, _History] = {}

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
        name = f"request-{len(self._histories)}"
        self._histories[name] = _History()
        view = WaitingView(
            request_id=name,
            num_prompt_tokens=prompt,
            max_new_tokens=new,
            arrival_s=self.now_s,
            priority=priority,
            num_cached_tokens=min(num_cached, prompt),
            tenant=tenant,
        )
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
        self._histories[name].preempted.append(self.num_decisions)
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
                request_id=name,
                num_tokens=s.num_tokens,
                num_left=s.num_left,
                max_new_left=s.max_new_left,
                arrival_s=s.view.arrival_s,
                priority=s.view.priority,
                num_promised=s.num_promised if setting.grows else None,
                tenant=s.view.tenant,
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
        case = DecisionCase(view, before, decision, self.num_decisions)
        assert repr(self.state) == before, (
            f"decide() changed the state in place to {self.state!r}{case}"
        )
        assert again == (decision, state), (
            f"for the same view and state, decide() returned another decision or state the second "
            f"time: {again[0]}, {again[1]!r}{case}"
        )
        check_state(state, case)
        check_decision(view, decision, case)
        left_out = who_could_run(view) if is_empty(decision) else None
        assert left_out is None, (
            f"the decision is empty, although a request could run: {left_out}{case}"
        )
        ending = [name for name, one in self.running.items() if one.is_ending]
        self.state = state
        self._num_idle = 0 if self._carry_out(decision) else self._num_idle + 1
        self.num_decisions += 1
        self.now_s += self.seconds_per_decision
        for name in ending:
            if name in self.running:
                self.end(name)
        check_books(self, case)
        stuck = self._num_idle >= MAX_IDLE_DECISIONS and (self.running or self.waiting)
        assert not stuck, (
            f"no token was processed in {self._num_idle} decisions: the last one "
            f"{self._why_idle(decision)}{case}"
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
        left = [*self.running, *self.waiting]
        assert not left, (
            f"after {max_decisions} decisions, {len(left)} requests have not ended: "
            f"{'; '.join(map(self.story, left[:4]))} (view: {self.view()})"
        )
        last = self.act()
        assert is_empty(last), f"no request waits or runs, but the decision is {last}"
        remembered = repr(self.state)
        kept = [name for name in self._histories if f"'{name}'" in remembered]
        assert not kept, (
            f"the state still holds requests that have ended: {kept[:4]} in {self.state!r}"
        )

    def num_preempted(self, name: str) -> int:
        """Return how often a request lost its row."""
        return len(self._histories[name].preempted)

    def has_decoded(self, name: str) -> bool:
        """Return whether a request has a row and its first token, and is not ending."""
        one = self.running.get(name)
        return one is not None and one.num_left == 0 and not one.is_ending

    def story(self, name: str) -> str:
        """Return what has become of a request that has not ended, for messages."""
        history, one = self._histories[name], self.running.get(name)
        times, was = len(history.preempted), ""
        if times:
            often = "once" if times == 1 else f"{times} times, last"
            was = f"was preempted {often} in decision {history.preempted[-1]}"
        if one is None:
            return f"{name} {was or 'was never admitted'}" + (
                ", and has not been admitted since" if times else ""
            )
        left = (
            f"{tokens(one.num_left)} of its prompt"
            if one.num_left
            else f"{tokens(one.max_new_left)} to decode"
        )
        admitted = f"was {'last ' if times else ''}admitted in decision {history.admitted[-1]}"
        return f"{name} {', '.join(part for part in (was, admitted) if part)}, and has {left} left"

    def _why_idle(self, decision: Decision) -> str:
        """Return how it came that a decision that was carried out processed no token."""
        if decision.preempt:
            return f"preempts {', '.join(decision.preempt)}"
        if decision.decode:
            rows = ", ".join(decision.decode[:4])
            return f"decodes {rows}, for whose next tokens no page is free"
        if decision.prefill:
            return f"admits {decision.prefill[0][0]}, for which too few pages are free"
        rows = ", ".join(list(self.running)[:4]) or "no row"
        return (
            f"is empty: with {tokens(self.free_tokens)} of free cache {rows} cannot go on, and "
            "none is preempted"
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
        self._histories[name].admitted.append(self.num_decisions)
        return True

    def _promise(self, one: _Sequence, num_tokens: int) -> bool:
        """Reserve cache for `num_tokens` in whole pages; return whether there was room."""
        wanted = -(-num_tokens // self.setting.page_size) * self.setting.page_size
        if self.setting.grows and wanted - one.num_promised > self.free_tokens:
            return False
        one.num_promised = max(one.num_promised, wanted)
        return True


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


def check_books(world: LoopSimulation, case: object) -> None:
    """Raise AssertionError with `case` when more is given out than there is."""
    assert len(world.running) <= world.setting.max_num_seqs, (
        f"more requests run than there are rows{case}"
    )
    assert world.free_tokens >= 0, f"more cache is reserved than there is{case}"
    assert not world.running.keys() & world.waiting.keys(), f"a request both waits and runs{case}"
