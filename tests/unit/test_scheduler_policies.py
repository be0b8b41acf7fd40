"""What each order of continuous batching promises beyond the contract: who goes first, who gives
way, who waits how long.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from enginebay.contracts.scheduler import (
    Decision,
    Limits,
    RunningView,
    Scheduler,
    SchedulerView,
    WaitingView,
)
from enginebay.serving.request_table import RequestTable
from enginebay.serving.running import Running
from enginebay.types import FrozenSampling, Request
from enginebay_schedulers.fcfs import Fcfs
from enginebay_schedulers.prefix_aware import PrefixAware, PrefixAwareOptions
from enginebay_schedulers.priority import Priority, PriorityOptions
from enginebay_schedulers.sjf import Sjf, SjfOptions
from enginebay_testing.scheduler_simulation import POOL, ROWS, LoopSimulation, SchedulerLimits


def decide(
    scheduler: Scheduler,
    wait: tuple[WaitingView, ...] = (),
    run: tuple[RunningView, ...] = (),
    *,
    now_s: float = 5.0,
    free_rows: int = 1,
    free_tokens: int = 1000,
) -> Decision:
    view = SchedulerView(now_s, wait, run, Limits(8, 64, 16, free_rows, free_tokens))
    return scheduler.decide(view, scheduler.initial_state())[0]


def admitted(scheduler: Scheduler, *wait: WaitingView, now_s: float = 5.0) -> str:
    """The one that gets the only free row."""
    ((name, _),) = decide(scheduler, wait, now_s=now_s).prefill
    return name


def waiting(
    name: str, arrival_s: float = 0.0, *, prompt: int = 10, priority: int = 0, cached: int = 0
) -> WaitingView:
    return WaitingView(name, prompt, 20, arrival_s, priority, cached)


def running(
    name: str, arrival_s: float = 0.0, *, priority: int = 0, promised: int = 9
) -> RunningView:
    """A decoding row that needs a token of cache for its next step."""
    return RunningView(name, 10, 0, 20, arrival_s, priority, promised)


# Priority.


def test_larger_priority_is_more_urgent() -> None:
    line = (
        waiting("low", 0.0, priority=-1),
        waiting("first", 1.0),
        waiting("second", 2.0),
        waiting("high", 3.0, priority=1),
    )
    assert admitted(Priority(), *line) == "high"
    assert admitted(Priority(), *line[:3]) == "first"


def test_waiting_makes_up_for_priority() -> None:
    line = (waiting("old", 0.0), waiting("urgent", 19.0, priority=2))
    assert admitted(Priority(PriorityOptions(ageing_s=10.0)), *line, now_s=19.0) == "urgent"
    assert admitted(Priority(PriorityOptions(ageing_s=9.0)), *line, now_s=19.0) == "old"


def test_priority_preempts_the_lowest_first_and_of_those_the_youngest() -> None:
    run = (
        running("low", 0.0, priority=0),
        running("high", 2.0, priority=5),
        running("lowest", 1.0, priority=-3),
        running("low too", 1.0),
    )
    scheduler = Priority()
    assert decide(scheduler, (), run, free_tokens=3).preempt == ("lowest",)
    assert decide(scheduler, (), run[:2] + run[3:], free_tokens=2).preempt == ("low too",)
    many = tuple(running(r.request_id, r.arrival_s, priority=r.priority, promised=0) for r in run)
    assert decide(scheduler, (), many, free_tokens=10).preempt == ("lowest", "low too", "low")


def test_urgent_request_takes_the_row_of_the_least_urgent_when_all_are_taken() -> None:
    run = tuple(running(f"p{p}", p, priority=p, promised=12) for p in range(3))
    decision = decide(Priority(), (waiting("urgent", 4.0, priority=2),), run, free_rows=0)
    assert (decision.preempt, decision.prefill) == (("p0",), (("urgent", 10),))
    assert set(decision.decode) == {"p1", "p2"}
    kept = decide(
        Priority(PriorityOptions(displace=False)),
        (waiting("urgent", priority=2),),
        run,
        free_rows=0,
    )
    assert not kept.preempt
    assert not kept.prefill


def test_nobody_is_displaced_by_an_equal_or_in_vain() -> None:
    run = tuple(running(f"p{p}", p, priority=p, promised=12) for p in range(3))
    assert not decide(Priority(), (waiting("equal", 4.0),), run, free_rows=0).preempt
    huge = waiting("huge", 4.0, prompt=100, priority=1)
    assert not decide(Priority(), (huge,), run, free_rows=0, free_tokens=50).preempt
    ending = RunningView("ending", 30, 0, 0, 0.0, 0, 29)
    assert not decide(
        Priority(), (waiting("urgent", 4.0, priority=1),), (*run, ending), free_rows=0
    ).preempt


def test_urgent_prompt_goes_before_the_rest_of_a_long_one() -> None:
    part = RunningView("long", 500, 400, 20, 0.0)
    decision = decide(Priority(), (waiting("urgent", 4.0, prompt=24, priority=1),), (part,))
    assert decision.prefill == (("urgent", 24), ("long", 40))


@pytest.mark.parametrize("setting", [ROWS, POOL], ids=["rows", "pool"])
def test_low_priority_is_served_within_its_ageing_under_a_flood_of_urgent_ones(
    setting: SchedulerLimits,
) -> None:
    world = LoopSimulation(
        Priority(PriorityOptions(ageing_s=5.0)), setting, seconds_per_decision=0.1
    )
    low = world.add(20, 10, priority=-2)
    while low not in world.ended:
        while len(world.waiting) < 10:
            world.add(10, 10, priority=2)
        world.act()
        # Four levels of five seconds, and the time that those take which came by then.
        assert world.now_s < 4 * 5.0 + 10.0
    assert world.now_s > 4 * 5.0


# Shortest job and longest cached prefix first.


def test_sjf_takes_the_shortest_prompt_that_is_not_cached() -> None:
    line = (
        waiting("long", prompt=50),
        waiting("middle", prompt=20),
        waiting("cached", prompt=50, cached=40),
    )
    assert admitted(Sjf(), *line) == "cached"
    assert admitted(Sjf(), *line[:2]) == "middle"


def test_prefix_aware_takes_the_longest_cached_prefix_and_else_the_first() -> None:
    line = (waiting("none", 0.0), waiting("some", 1.0, cached=4), waiting("most", 2.0, cached=8))
    assert admitted(PrefixAware(), *line) == "most"
    assert admitted(PrefixAware(), waiting("a", 1.0), waiting("b", 0.0)) == "b"


@pytest.mark.parametrize(
    "scheduler", [Sjf(SjfOptions(max_wait_s=5.0)), PrefixAware(PrefixAwareOptions(max_wait_s=5.0))]
)
def test_who_has_waited_long_enough_goes_first_in_order_of_arrival(scheduler: Scheduler) -> None:
    line = (
        waiting("late too", 1.0, prompt=30),
        waiting("late", 0.5, prompt=50),
        waiting("best", 2.0, prompt=3, cached=2),
    )
    assert admitted(scheduler, *line, now_s=5.4) == "best"
    assert admitted(scheduler, *line, now_s=6.5) == "late"


@pytest.mark.parametrize("make", [Sjf, PrefixAware], ids=["sjf", "prefix_aware"])
def test_the_youngest_is_preempted_first(make: Callable[[], Scheduler]) -> None:
    run = (running("late", 2.0), running("early", 1.0))
    assert decide(make(), (), run, free_tokens=1).preempt == ("late",)


def test_short_prompts_wait_less_by_sjf_than_by_arrival() -> None:
    def mean_wait(scheduler: Scheduler) -> float:
        world = LoopSimulation(scheduler, ROWS)
        for _ in range(10):
            world.add(70, 8)
        short = [world.add(4, 8) for _ in range(10)]
        world.finish(1000)
        return float(np.mean([world.ended[name] for name in short]))

    assert mean_wait(Sjf()) < 0.5 * mean_wait(Fcfs())


# What the loop tells them.


def table_of_one() -> tuple[RequestTable, Running]:
    sampling = FrozenSampling(4)
    one = Request(
        "a", np.asarray([5, 6], np.int32), sampling, (0, 1), 2.0, priority=3, tenant="ours"
    )
    table = RequestTable()
    table.add(Running(one))
    return table, table.waiting["a"]


LIMITS = Limits(8, 64, 4, 8, 1000)


def test_views_carry_the_tenant_and_priority_of_a_request() -> None:
    table, _ = table_of_one()
    (waits,) = table.view(2.5, LIMITS).waiting
    assert (waits.tenant, waits.priority, waits.num_cached_tokens, waits.num_left) == (
        "ours",
        3,
        0,
        2,
    )
    table.running = table.waiting
    (runs,) = table.view(2.5, LIMITS).running
    assert (runs.tenant, runs.priority, runs.num_tokens) == ("ours", 3, 2)


def test_views_carry_what_the_cache_has_of_all_tokens_to_prefill() -> None:
    table, tracked = table_of_one()
    seen: list[list[int]] = []

    def num_cached(tracked: Running) -> int:
        seen.append(tracked.tokens_to_prefill.tolist())
        return 1

    assert table.view(2.5, LIMITS, num_cached).waiting[0].num_cached_tokens == 1
    tracked.output += [8]
    table.running = table.waiting
    table.requeue(tracked)
    assert table.view(2.5, LIMITS, num_cached).waiting[0].num_prompt_tokens == 3
    assert seen == [[5, 6], [5, 6, 8]]
