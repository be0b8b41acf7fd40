"""Conformance suite for any scheduler: runs of the model loop in which requests do all that they
can do.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Mapping
from typing import Any

import hypothesis
from hypothesis import stateful
from hypothesis import strategies as st

from enginebay.contracts.scheduler import Decision, Scheduler, SchedulerView, WaitingView
from enginebay_testing.scheduler_simulation import (
    POOL,
    ROWS,
    SETTINGS,
    LoopSimulation,
    SchedulerLimits,
)
from enginebay_testing.verdicts import Check

MakeScheduler = Callable[[], Scheduler]

ORDERS: dict[str, Callable[[int, WaitingView], float]] = {
    "arrival": lambda place, _: place,
    "priority": lambda _, one: -one.priority,
    "shortest_prompt": lambda _, one: one.num_left,
    "cached_prefix": lambda _, one: -one.num_cached_tokens,
}
"""Orders that the capability "order" may declare: of requests that arrive together, the one with
the smallest key is admitted first.

Each function takes a request's place in the queue and its view. Ties may go either way.
"""


@dataclasses.dataclass(frozen=True)
class Flood:
    """Requests that keep arriving while another one waits; `one(i)` returns the fields of the i-th.

    They are short and the waiting request is long; with `are_long` it is the other way round. With
    `preempts`, the request loses its row once, after its first token, as the loop may do.
    """

    one: Callable[[int], dict[str, Any]] = lambda _: {}
    are_long: bool = False
    preempts: bool = False


FLOODS: dict[str, Flood] = {
    "short": Flood(),
    "long": Flood(are_long=True),
    "urgent": Flood(lambda _: {"priority": 3}),
    "relaxed": Flood(lambda _: {"priority": -3}),
    "cached": Flood(lambda _: {"num_cached": 5}),
    "tenants": Flood(lambda i: {"tenant": f"tenant-{i}"}),
    "one_tenant": Flood(lambda _: {"tenant": "another"}),
    "preempted": Flood(preempts=True),
}
"""Floods that might make a request wait forever."""

WAITING_TENANT = "mine"
"""Tenant of the request that waits."""

MAX_FLOODED_DECISIONS = 600


def scheduler_checks(make: MakeScheduler, order: str | None = None) -> list[Check]:
    """Return every check for the scheduler that `make()` returns, with its default or other
    options.

    `order` is one of ORDERS if the scheduler declares an order.
    """
    checks: list[Check] = [
        ("nothing_to_do_gives_an_empty_decision", functools.partial(_nothing_to_do, make)),
    ]
    for name in ("rows", "pool", "pages"):  # first: the other checks would fail in these rules, too
        rules = functools.partial(_decisions_keep_the_rules, make, SETTINGS[name])
        checks.append((f"decisions_keep_the_rules[{name}]", rules))
    checks.append(("a_run_can_be_replayed", functools.partial(_a_run_can_be_replayed, make)))
    for name in FLOODS:
        checks.append(
            (
                f"no_request_starves_in_a_flood[{name}]",
                functools.partial(_no_request_starves, make, name),
            )
        )
    for name, setting in SETTINGS.items():
        checks.append(
            (f"everything_ends[{name}]", functools.partial(_everything_ends, make, setting))
        )
        if order is not None:
            kept = functools.partial(_order_is_kept, make, setting, order)
            checks.append((f"order_is_kept[{order}-{name}]", kept))
    for name in ("rows", "pool", "pages"):
        checks.append(
            (f"invariants_hold[{name}]", functools.partial(_invariants_hold, make, SETTINGS[name]))
        )
    return checks


def check_order(view: SchedulerView, decision: Decision, order: str) -> None:
    """Raise AssertionError when a request is admitted before another that comes first
    in the order.
    """
    admitted = {name for name, _ in decision.prefill}
    ranks = {one.request_id: ORDERS[order](i, one) for i, one in enumerate(view.waiting)}
    last = max((rank for name, rank in ranks.items() if name in admitted), default=0.0)
    passed = [name for name, rank in ranks.items() if name not in admitted and rank < last]
    some = bool(admitted & ranks.keys())
    assert not (some and passed), (
        f"{passed[:4]} come first by {order}, but were passed over"
        f"\nview: {view}\ndecision: {decision}"
    )


def _nothing_to_do(make: MakeScheduler) -> None:
    LoopSimulation(make(), ROWS).finish(0)


def _add_any(world: LoopSimulation, chance: random.Random) -> int:
    """Add a random request and return its length in tokens."""
    prompt, new = chance.choice([1, 3, 31, 32, 33, 70]), chance.choice([1, 2, 9, 40])
    cached = chance.choice([0, 0, prompt // 2, prompt])
    world.add(
        prompt, new, cached, priority=chance.choice([-1, 0, 0, 2]), tenant=chance.choice("aab")
    )
    return prompt + new


def _busy_simulation(
    make: MakeScheduler, setting: SchedulerLimits, seed: int
) -> tuple[LoopSimulation, int]:
    """Return a world that has served random requests for a while, and a bound on the decisions to
    finish.
    """
    world, chance = LoopSimulation(make(), setting), random.Random(seed)
    total = 0
    for _ in range(chance.randrange(5, 40)):
        for _ in range(chance.choice([0, 1, 1, 2, 8])):
            total += _add_any(world, chance)
        world.act()
        alive = [*world.waiting, *world.running]
        if alive and chance.random() < 0.2:
            world.abort(chance.choice(alive))
    return world, 50 + 8 * total


def _decisions_keep_the_rules(make: MakeScheduler, setting: SchedulerLimits) -> None:
    """Check each decision of some runs, whatever becomes of their requests."""
    for seed in range(4):
        world, _ = _busy_simulation(make, setting, seed)
        for _ in range(20):
            world.act()


def _everything_ends(make: MakeScheduler, setting: SchedulerLimits) -> None:
    for seed in range(6):
        world, max_decisions = _busy_simulation(make, setting, seed)
        world.finish(max_decisions)


def _a_run_can_be_replayed(make: MakeScheduler) -> None:
    """Check that the same history gives the same decisions, also from another scheduler object."""
    histories = []
    for _ in range(2):
        world, _ = _busy_simulation(make, POOL, seed=3)
        histories.append([world.act() for _ in range(30)])
    assert histories[0] == histories[1], "two runs over the same requests differ"


def _order_is_kept(make: MakeScheduler, setting: SchedulerLimits, order: str) -> None:
    """Check that, of requests that arrive together and while no time passes, none is admitted
    before a request that comes first in the order.
    """
    assert order in ORDERS, f"order {order!r} is not among {', '.join(ORDERS)}"
    for seed in range(4):
        world, chance = (
            LoopSimulation(make(), setting, seconds_per_decision=0.0),
            random.Random(seed),
        )
        for _ in range(3 * min(setting.max_num_seqs, 8)):
            _add_any(world, chance)
        while world.waiting or world.running:
            view = world.view()
            check_order(view, world.act(), order)
            assert world.num_decisions < 20_000, f"these requests do not end: {world.view()}"


def _no_request_starves(make: MakeScheduler, flood: str) -> None:
    """Check that a request and all earlier requests end, although more requests keep arriving than
    the engine can serve. A decision takes half a second.
    """
    kind = FLOODS[flood]
    for setting in (ROWS, POOL):
        short, long = (5, 10), (setting.max_model_len * 3 // 4, setting.max_model_len // 4)
        others, mine = (long, short) if kind.are_long else (short, long)
        world = LoopSimulation(make(), setting, seconds_per_decision=0.5)
        watched = [world.add(*others, **kind.one(i)) for i in range(setting.max_num_seqs)]
        world.act()
        one = world.add(*mine, tenant=WAITING_TENANT)
        watched.append(one)
        for i in range(MAX_FLOODED_DECISIONS):
            world.now_s += 0.1  # so that the new requests arrive later
            if kind.preempts and world.num_preempted(one) == 0 and world.has_decoded(one):
                world.preempt(one)
            while len(world.waiting) < 2 * setting.max_num_seqs:
                world.add(*others, **kind.one(i + len(world.waiting)))
            world.act()
            if world.ended.keys() >= set(watched):
                break
        for name in watched:
            rest = _told(others, kind.one(0))
            which = _told(mine, {"tenant": WAITING_TENANT}) if name == one else rest
            assert name in world.ended, (
                f"a request of {which} has not ended after {MAX_FLOODED_DECISIONS} decisions of "
                f"half a second while others of {rest} kept coming: {world.story(name)} ({setting})"
            )


def _told(lengths: tuple[int, int], fields: Mapping[str, Any]) -> str:
    """Return the lengths and other fields of a request, for messages."""
    named = "".join(f", {name} {value!r}" for name, value in fields.items())
    return f"{lengths[0]} + {lengths[1]} tokens{named}{',' if named else ''}"


def _invariants_hold(make: MakeScheduler, setting: SchedulerLimits) -> None:
    """Run a hypothesis state machine: requests arrive, end, are aborted and preempted, and time
    passes, in any order.
    """

    class Machine(stateful.RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.world = LoopSimulation(make(), setting)

        @stateful.rule(
            prompt=st.integers(1, 90),
            new=st.integers(1, 40),
            cached=st.integers(0, 90),
            priority=st.integers(-2, 2),
            tenant=st.sampled_from(["", "a", "b"]),
        )
        def add(self, prompt: int, new: int, cached: int, priority: int, tenant: str) -> None:
            self.world.add(prompt, new, cached, priority=priority, tenant=tenant)

        @stateful.rule(times=st.integers(1, 4))
        def act(self, times: int) -> None:
            for _ in range(times):
                self.world.act()

        @stateful.rule(which=st.integers(0, 100))
        def abort(self, which: int) -> None:
            alive = [*self.world.running, *self.world.waiting]
            if alive:
                self.world.abort(alive[which % len(alive)])

        @stateful.rule(which=st.integers(0, 100))
        def end(self, which: int) -> None:
            begun = [name for name, one in self.world.running.items() if one.num_left == 0]
            if begun:
                self.world.end(begun[which % len(begun)])

        @stateful.rule(which=st.integers(0, 100))
        def preempt(self, which: int) -> None:
            running = list(self.world.running)
            if running:
                self.world.preempt(running[which % len(running)])

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
