"""Conformance suite for any scheduler: a model of the serving loop that holds every decision to the contract."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import stateful
from hypothesis import strategies as st

from enginebay.scheduler import Decision, Limits, RunningView, Scheduler, SchedulerView, WaitingView

Check = tuple[str, Callable[[], None]]
"""A name and a function that raises AssertionError, with the case, when the promise is broken."""

MakeScheduler = Callable[[], Scheduler]

MOST_IDLE_DECISIONS = 50
"""More decisions on end in which no token moves are no scheduling."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """An engine as the scheduler sees it. Its cache has rows of fixed size, or is one pool that requests grow in."""

    max_num_seqs: int = 4
    max_num_batched_tokens: int = 32
    max_decode_steps: int = 8
    num_cache_tokens: int = 320
    grows: bool = False

    @property
    def max_model_len(self) -> int:
        """Prompt and output that always fit when a request is alone."""
        return self.num_cache_tokens if self.grows else self.num_cache_tokens // self.max_num_seqs


ROWS = Setting()
POOL = Setting(num_cache_tokens=120, grows=True)
SETTINGS = {
    "rows": ROWS,
    "pool": POOL,
    "one_row": Setting(max_num_seqs=1, num_cache_tokens=80),
    "budget_of_one": Setting(max_num_batched_tokens=1, num_cache_tokens=48),
    "many_rows": Setting(max_num_seqs=64, max_num_batched_tokens=48, num_cache_tokens=64 * 80),
    "tight_pool": Setting(max_num_seqs=16, num_cache_tokens=90, max_decode_steps=4, grows=True),
}


@dataclasses.dataclass(slots=True)
class _Sequence:
    name: str
    arrival_s: float
    num_prefill: int
    max_new_left: int
    num_cached: int = 0
    num_done: int = 0
    """Prompt tokens prefilled."""
    num_tokens: int = 0
    num_promised: int = 0

    @property
    def num_left(self) -> int:
        return self.num_prefill - self.num_done


class World:
    """The serving loop without engine: requests come, decisions are checked and carried out, requests end.

    `act()` asks the scheduler once. Every broken promise is an AssertionError that tells the view and the decision.
    """

    def __init__(self, scheduler: Scheduler, setting: Setting) -> None:
        self.scheduler = scheduler
        self.setting = setting
        self.state: Any = scheduler.initial_state()
        self.now_s = 0.0
        self.waiting: dict[str, _Sequence] = {}
        self.running: dict[str, _Sequence] = {}
        self.ended: dict[str, float] = {}
        self.num_decisions = 0
        self._num_idle = 0
        self._num_added = 0

    def add(self, num_prompt: int, max_new: int, num_cached: int = 0) -> str:
        """A new request, of lengths cut to what the engine could serve."""
        most = self.setting.max_model_len
        prompt = min(num_prompt, most - 1)
        name = f"r{self._num_added}"
        self._num_added += 1
        self.waiting[name] = _Sequence(
            name, self.now_s, prompt, min(max_new, most - prompt), min(num_cached, prompt)
        )
        return name

    def abort(self, name: str) -> None:
        """A waiting or running request is gone."""
        self.waiting.pop(name, None)
        self.running.pop(name, None)

    @property
    def free_tokens(self) -> int:
        """Cache that is promised to nobody."""
        if self.setting.grows:
            return self.setting.num_cache_tokens - sum(s.num_promised for s in self.running.values())
        return (self.setting.max_num_seqs - len(self.running)) * self.setting.max_model_len

    def view(self) -> SchedulerView:
        """What the scheduler sees."""
        setting = self.setting
        free_rows = setting.max_num_seqs - len(self.running)
        limits = Limits(
            setting.max_num_seqs,
            setting.max_num_batched_tokens,
            setting.max_decode_steps,
            free_rows,
            self.free_tokens,
        )
        waiting = (
            WaitingView(s.name, s.num_prefill, s.max_new_left, s.arrival_s, num_cached_tokens=s.num_cached)
            for s in self.waiting.values()
        )
        running = (
            RunningView(
                s.name,
                s.num_tokens,
                s.num_left,
                s.max_new_left,
                s.arrival_s,
                num_promised=s.num_promised if setting.grows else None,
            )
            for s in self.running.values()
        )
        return SchedulerView(self.now_s, tuple(waiting), tuple(running), limits)

    def act(self) -> Decision:
        """One decision: asked for twice, checked, carried out."""
        view = self.view()
        before = repr(self.state)
        decision, state = self.scheduler.decide(view, self.state)
        again = self.scheduler.decide(copy.deepcopy(view), copy.deepcopy(self.state))
        case = f"\nview: {view}\nstate: {before}\ndecision: {decision}"
        assert repr(self.state) == before, f"decide changed its state to {self.state!r}{case}"
        assert again == (decision, state), f"the same view and state gave {again[0]} the second time{case}"
        check_decision(view, decision, case)
        could_run = bool(decision.prefill or decision.decode or decision.preempt) or not _something_could_run(
            view
        )
        assert could_run, f"an empty decision, though something could run{case}"
        self.state = state
        self.num_decisions += 1
        self.now_s += 0.01
        self._num_idle = 0 if self._carry_out(decision, case) else self._num_idle + 1
        stuck = self._num_idle >= MOST_IDLE_DECISIONS and (self.running or self.waiting)
        assert not stuck, f"no token in {self._num_idle} decisions; the last:{case}"
        return decision

    def _carry_out(self, decision: Decision, case: str) -> bool:
        """Whether any token was processed."""
        moved = bool(decision.prefill)
        for name in decision.preempt:
            gone = self.running.pop(name)
            again = _Sequence(name, gone.arrival_s, max(gone.num_tokens, gone.num_prefill), gone.max_new_left)
            self.waiting = {name: again, **self.waiting}
        for name, num in decision.prefill:
            one = self.waiting.pop(name, None)
            if one is not None:
                one.num_done = min(one.num_cached, one.num_prefill - 1)
                one.num_tokens = one.num_promised = one.num_prefill
                self.running[name] = one
                assert self.free_tokens >= 0, f"{name} was admitted without cache for its prompt{case}"
            one = self.running[name]
            one.num_done += num
            if one.num_left == 0:
                self._grow(one, 1)
        for name in decision.decode:
            one = self.running[name]
            steps = min(decision.decode_steps, one.max_new_left)
            # The last token has no place in the cache until it runs. A row that finds none is passed over.
            wanted = one.num_tokens - 1 + steps
            if not self.setting.grows or wanted - one.num_promised <= self.free_tokens:
                one.num_promised = max(one.num_promised, wanted)
                self._grow(one, steps)
                moved = True
        return moved

    def _grow(self, one: _Sequence, num_new: int) -> None:
        one.num_tokens += num_new
        one.max_new_left -= num_new
        if one.max_new_left == 0:
            del self.running[one.name]
            self.ended[one.name] = self.now_s

    def finish(self, most_decisions: int) -> None:
        """Act until nothing is left. AssertionError when that takes more than `most_decisions`."""
        for _ in range(most_decisions):
            if not self.waiting and not self.running:
                return
            self.act()
        left = [*self.running.values(), *self.waiting.values()]
        assert not left, (
            f"after {most_decisions} decisions these have not ended: {left[:4]} (view: {self.view()})"
        )


def check_decision(view: SchedulerView, decision: Decision, case: str) -> None:
    """AssertionError with `case` when a decision breaks one of the contract's invariants."""
    waiting = {one.request_id: one for one in view.waiting}
    running = {row.request_id: row for row in view.running}
    prefilled = [name for name, _ in decision.prefill]
    names = [*prefilled, *decision.decode, *decision.preempt]
    assert len(set(names)) == len(names), f"a request is named twice{case}"
    assert set(names) <= waiting.keys() | running.keys(), f"a request is named that is not in the view{case}"
    assert set(decision.preempt) <= running.keys(), f"a request is preempted that does not run{case}"
    assert 1 <= decision.decode_steps <= view.limits.max_decode_steps, (
        f"decode_steps out of 1 to max_decode_steps{case}"
    )
    num_tokens = sum(num for _, num in decision.prefill) + len(decision.decode)
    assert num_tokens <= view.limits.max_num_batched_tokens, (
        f"{num_tokens} tokens are over max_num_batched_tokens{case}"
    )
    for name, num in decision.prefill:
        left = running[name].num_left if name in running else _prompt_left(waiting[name])
        assert 1 <= num <= left, f"{name} is to prefill {num} of {left} tokens{case}"
    for name in decision.decode:
        ready = name in running and running[name].num_left == 0
        assert ready, f"{name} is to decode before its prompt is prefilled{case}"
    admitted = [waiting[name] for name in prefilled if name in waiting]
    freed = sum(running[name].num_promised or 0 for name in decision.preempt)
    assert len(admitted) <= view.limits.free_rows + len(decision.preempt), (
        f"more are admitted than there are free rows{case}"
    )
    known = all(running[name].num_promised is not None for name in decision.preempt)
    wanted = sum(one.num_prompt_tokens for one in admitted)
    assert not known or wanted <= view.limits.free_tokens + freed, (
        f"prompts of {wanted} tokens are over free_tokens{case}"
    )


def _prompt_left(one: WaitingView) -> int:
    return max(1, one.num_prompt_tokens - one.num_cached_tokens)


def _something_could_run(view: SchedulerView) -> bool:
    """Whether a row can go on as it is, or the first of the waiting can be admitted while nothing runs."""
    for row in view.running:
        fits = row.num_promised is None or row.num_tokens - row.num_promised <= view.limits.free_tokens
        if row.num_left > 0 or (row.max_new_left > 0 and fits):
            return True
    if view.running or not view.waiting or view.limits.free_rows < 1:
        return False
    return view.waiting[0].num_prompt_tokens + 1 <= view.limits.free_tokens


def scheduler_checks(make: MakeScheduler) -> list[Check]:
    """Every check of the contract for the scheduler that `make()` gives, with its default or any other options."""
    checks: list[Check] = [
        ("nothing_to_do_gives_an_empty_decision", functools.partial(_nothing_to_do, make)),
        ("a_run_can_be_replayed", functools.partial(_a_run_can_be_replayed, make)),
        ("nobody_starves_in_a_flood", functools.partial(_nobody_starves_in_a_flood, make)),
    ]
    for name, setting in SETTINGS.items():
        checks.append((f"everything_ends[{name}]", functools.partial(_everything_ends, make, setting)))
    for name, setting in (("rows", ROWS), ("pool", POOL)):
        checks.append((f"invariants_hold[{name}]", functools.partial(_invariants_hold, make, setting)))
    return checks


def _nothing_to_do(make: MakeScheduler) -> None:
    decision = World(make(), ROWS).act()
    empty = not (decision.prefill or decision.decode or decision.preempt)
    assert empty, f"nothing waits or runs, yet the decision is {decision}"


def _busy_world(make: MakeScheduler, setting: Setting, seed: int) -> tuple[World, int]:
    """A world in which requests have come, gone and been served for a while, and a bound on decisions to finish."""
    world, chance = World(make(), setting), random.Random(seed)
    total = 0
    for _ in range(chance.randrange(5, 40)):
        for _ in range(chance.choice([0, 1, 1, 2, 8])):
            prompt, new = chance.choice([1, 3, 31, 32, 33, 70]), chance.choice([1, 2, 9, 40])
            world.add(prompt, new, chance.choice([0, 0, prompt // 2, prompt]))
            total += prompt + new
        world.act()
        alive = [*world.waiting, *world.running]
        if alive and chance.random() < 0.2:
            world.abort(chance.choice(alive))
    return world, 50 + 8 * total


def _everything_ends(make: MakeScheduler, setting: Setting) -> None:
    for seed in range(6):
        world, most_decisions = _busy_world(make, setting, seed)
        world.finish(most_decisions)


def _a_run_can_be_replayed(make: MakeScheduler) -> None:
    """The same history gives the same decisions, from another scheduler object too."""
    histories = []
    for _ in range(2):
        world, _ = _busy_world(make, POOL, seed=3)
        histories.append([world.act() for _ in range(30)])
    assert histories[0] == histories[1], "two runs over the same requests differ"


def _nobody_starves_in_a_flood(make: MakeScheduler) -> None:
    """A long request ends although, for ever, more short ones come than can be served."""
    for setting in (ROWS, POOL):
        world = World(make(), setting)
        for _ in range(setting.max_num_seqs):
            world.add(5, 10)
        world.act()
        long = world.add(setting.max_model_len * 3 // 4, setting.max_model_len // 4)
        for _ in range(600):
            while len(world.waiting) < 2 * setting.max_num_seqs:
                world.add(5, 10)
            world.act()
            if long in world.ended:
                break
        assert long in world.ended, (
            f"a long request has not ended after 600 decisions while short ones kept coming ({setting})"
        )


def _invariants_hold(make: MakeScheduler, setting: Setting) -> None:
    """A hypothesis state machine: requests come and go and time passes between decisions, in any order."""

    class Machine(stateful.RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.world = World(make(), setting)

        @stateful.rule(prompt=st.integers(1, 90), new=st.integers(1, 40), cached=st.integers(0, 90))
        def add(self, prompt: int, new: int, cached: int) -> None:
            self.world.add(prompt, new, cached)

        @stateful.rule(times=st.integers(1, 4))
        def act(self, times: int) -> None:
            for _ in range(times):
                self.world.act()

        @stateful.rule(which=st.integers(0, 100))
        def abort(self, which: int) -> None:
            alive = [*self.world.running, *self.world.waiting]
            if alive:
                self.world.abort(alive[which % len(alive)])

        @stateful.rule(seconds=st.floats(0.0, 100.0))
        def time_passes(self, seconds: float) -> None:
            self.world.now_s += seconds

        def teardown(self) -> None:
            self.world.finish(5000)

    settings = hypothesis.settings(
        max_examples=40,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
    )
    stateful.run_state_machine_as_test(Machine, settings=settings)
