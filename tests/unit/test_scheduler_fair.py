"""The fair scheduler: what tenants are served, and what they pay."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator

import pytest

from enginebay.contracts.scheduler import Limits, RunningView, Scheduler, SchedulerView, WaitingView
from enginebay_schedulers.counters import Counters, TenantCounter
from enginebay_schedulers.fair import Fair, FairOptions
from enginebay_schedulers.fcfs import Fcfs
from enginebay_testing.scheduler_simulation import POOL, ROWS, LoopSimulation, SchedulerLimits


def running(name: str, arrival_s: float, tenant: str) -> RunningView:
    """A decoding row that needs a token of cache for its next step."""
    return RunningView(name, 10, 0, 20, arrival_s, 0, 9, tenant)


def admitted(line: tuple[WaitingView, ...], free_rows: int) -> list[str]:
    view = SchedulerView(5.0, line, (), Limits(8, 64, 16, free_rows, 1000))
    return [name for name, _ in Fair().decide(view, Counters())[0].prefill]


class Served:
    """A world whose tenants' service is counted as the paper counts it: one for a prompt token, two
    for a new one.
    """

    def __init__(self, scheduler: Scheduler, setting: SchedulerLimits = ROWS) -> None:
        self.world = LoopSimulation(scheduler, setting)
        self.tenants: dict[str, str] = {}
        self.service: collections.Counter[str] = collections.Counter()

    def add(self, tenant: str, prompt: int, new: int) -> str:
        name = self.world.add(prompt, new, tenant=tenant)
        self.tenants[name] = tenant
        return name

    def num_waiting(self, tenant: str) -> int:
        return sum(self.tenants[name] == tenant for name in self.world.waiting)

    def act(self) -> None:
        left = {row.request_id: row.num_left for row in self.world.view().running}
        left |= {one.request_id: one.num_left for one in self.world.view().waiting}
        new = {row.request_id: row.max_new_left for row in self.world.view().running}
        decision = self.world.act()
        for name, num in decision.prefill:
            self.service[self.tenants[name]] += num + 2 * (num == left[name])
        for name in decision.decode:
            self.service[self.tenants[name]] += 2 * min(decision.decode_steps, new[name])


def gaps(scheduler: Scheduler, *, num_decisions: int = 600) -> Iterator[int]:
    """Service of a tenant that queues forty long requests at a time, over that of one that always
    has a few short ones.
    """
    served = Served(scheduler)
    for _ in range(num_decisions):
        if served.num_waiting("flood") < 20:
            for _ in range(40):
                served.add("flood", 30, 40)
        while served.num_waiting("steady") < 6:
            served.add("steady", 10, 20)
        served.act()
        yield served.service["flood"] - served.service["steady"]


def test_service_of_two_tenants_that_wait_differs_by_a_bounded_amount() -> None:
    # The paper's bound: twice the larger of a prompt's price and the price of all tokens that can
    # run together.
    bound = 2 * max(30, 2 * ROWS.num_cache_tokens)
    assert max(map(abs, gaps(Fair()))) <= bound
    assert max(gaps(Fcfs())) > 5 * bound


def test_gap_between_tenants_does_not_grow_with_time() -> None:
    found = [abs(gap) for gap in gaps(Fair(), num_decisions=1200)]
    assert max(found[600:]) <= 1.5 * max(found[:600])


@pytest.mark.parametrize("setting", [ROWS, POOL], ids=["rows", "pool"])
def test_tenant_below_its_share_hardly_notices_a_flood(setting: SchedulerLimits) -> None:
    def longest_wait(scheduler: Scheduler, flood: int, *, num_requests: int = 10) -> float:
        served = Served(scheduler, setting)
        for _ in range(flood):
            served.add("flood", 20, 20)
        waits = []
        for _ in range(num_requests):
            begin_s = served.world.now_s
            name = served.add("light", 5, 5)
            while name not in served.world.ended:
                served.act()
            waits.append(served.world.now_s - begin_s)
        assert num_requests == 1 or not flood or served.num_waiting("flood"), (
            "the flood is over too soon"
        )
        return max(waits)

    # At worst it waits until one of the rows is free: a request of the flood takes some ten
    # decisions.
    assert longest_wait(Fair(), 120) <= longest_wait(Fair(), 0) + 0.2
    assert longest_wait(Fair(), 120) < longest_wait(Fcfs(), 120, num_requests=1) / 5


def test_tenant_saves_up_no_service_while_it_is_away() -> None:
    served = Served(Fair())
    for _ in range(300):
        served.add("busy", 10, 20)
    for _ in range(100):
        served.act()
    before = served.service["busy"]
    assert before > 1000
    for _ in range(60):
        served.add("back", 10, 20)
    for _ in range(60):
        served.act()
    busy = served.service["busy"] - before
    assert busy > 0.35 * (busy + served.service["back"])


def test_tenant_that_was_alone_does_not_pay_for_it_when_another_comes() -> None:
    served = Served(Fair())
    for _ in range(100):  # alone, and never more than the rows can take
        while len(served.world.running) + len(served.world.waiting) < 2:
            served.add("alone", 10, 20)
        served.act()
    before = served.service["alone"]
    for _ in range(60):
        served.add("alone", 10, 20)
        served.add("new", 10, 20)
    for _ in range(60):
        served.act()
    alone = served.service["alone"] - before
    assert alone > 0.35 * (alone + served.service["new"])


def test_tenant_that_others_overtook_too_long_goes_first_once() -> None:
    scheduler = Fair(FairOptions(max_wait_s=5.0))
    state = Counters(
        (
            TenantCounter("rich", 1000.0, admitted_s=1.0, queued=True),
            TenantCounter("poor", 10.0, 5.0, queued=True),
        )
    )
    line = (
        WaitingView("r0", 10, 20, 0.0, tenant="rich"),
        WaitingView("r1", 10, 20, 0.0, tenant="rich"),
        WaitingView("p0", 10, 20, 0.0, tenant="poor"),
    )
    for now_s, order in ((5.9, ["p0", "r0", "r1"]), (6.1, ["r0", "p0", "r1"])):
        view = SchedulerView(now_s, line, (), Limits(8, 64, 16, 8, 1000))
        assert [name for name, _ in scheduler.decide(view, state)[0].prefill] == order


def test_counters_of_absent_tenants_are_forgotten() -> None:
    served = Served(Fair(FairOptions(max_wait_s=0.5)))
    for i in range(200):
        served.add(f"tenant-{i}", 5, 5)
        served.act()
    assert len(served.world.state.accounts) < 100


def test_fair_preempts_the_tenant_that_was_served_most_but_never_the_oldest_row() -> None:
    run = (
        running("oldest", 0.0, "rich"),
        running("poor", 2.0, "poor"),
        running("rich", 1.0, "rich"),
    )
    state = Counters(
        (TenantCounter("rich", 100.0), TenantCounter("poor", 1.0)),
        tuple((r.request_id, 10) for r in run),
    )
    for free_tokens, preempted in ((2, ("rich",)), (3, ())):
        view = SchedulerView(5.0, (), run, Limits(8, 64, 16, 1, free_tokens))
        assert Fair().decide(view, state)[0].preempt == preempted


def test_counters_follow_what_the_views_show() -> None:
    scheduler = Fair(FairOptions(input_weight=1.0, output_weight=3.0))
    limits = Limits(8, 64, 4, 1, 1000)

    def step(
        state: Counters, wait: tuple[WaitingView, ...] = (), run: tuple[RunningView, ...] = ()
    ) -> Counters:
        return scheduler.decide(SchedulerView(1.0, wait, run, limits), state)[1]

    def counter(state: Counters) -> float:
        (account,) = state.accounts
        return account.counter

    first = WaitingView("a", 70, 20, 0.0, num_cached_tokens=2, tenant="t")
    chunk = step(scheduler.initial_state(), (first,))
    assert counter(chunk) == 68  # the whole prompt when it is admitted, though 64 tokens run now
    refused = step(chunk, (first,))
    assert counter(refused) == 68  # its row was not given, and it is not charged again
    done = step(refused, (), (RunningView("a", 70, 4, 20, 0.0, tenant="t"),))
    assert counter(done) == 68 + 3
    decoded = step(done, (), (RunningView("a", 71, 0, 19, 0.0, tenant="t"),))
    assert counter(decoded) == 68 + 3 + 4 * 3
    passed_over = step(decoded, (), (RunningView("a", 71, 0, 19, 0.0, tenant="t"),))
    assert counter(passed_over) == counter(decoded)
    preempted = step(passed_over, (WaitingView("a", 72, 18, 0.0, tenant="t"),))
    assert (
        counter(preempted) == 68 + 3 + 3
    )  # one of the four tokens came, and the prompt is paid for
    assert step(preempted).paid == ()


def test_all_of_one_tenant_go_in_order_of_arrival() -> None:
    line = tuple(WaitingView(f"{i}", 5 + i, 20, float(i), tenant="t") for i in range(4))
    assert admitted(line, 4) == ["0", "1", "2", "3"]


def test_free_rows_are_shared_in_turn() -> None:
    line = tuple(
        WaitingView(f"{t}{i}", 10, 20, 0.0, tenant=t) for t, i in itertools.product("abc", range(4))
    )
    assert admitted(line, 5) == ["a0", "b0", "c0", "a1", "b1"]
