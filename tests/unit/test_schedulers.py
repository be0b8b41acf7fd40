"""The built-in schedulers pass the schedulers' conformance suite, and do what their pages say."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import enginebay_schedulers
from enginebay.contracts.scheduler import (
    Decision,
    Limits,
    RunningView,
    Scheduler,
    SchedulerView,
    WaitingView,
)
from enginebay_schedulers.fair import Fair, FairOptions
from enginebay_schedulers.fcfs import Fcfs, FcfsOptions
from enginebay_schedulers.prefix_aware import PrefixAware, PrefixAwareOptions
from enginebay_schedulers.priority import Priority, PriorityOptions
from enginebay_schedulers.sjf import Sjf, SjfOptions
from enginebay_schedulers.static_batch import StaticBatch, StaticBatchOptions
from enginebay_testing.scheduler_simulation import ROWS, LoopSimulation, SchedulerLimits
from enginebay_testing.schedulers import scheduler_checks

MAKERS: dict[str, Callable[[], Scheduler]] = {
    "fcfs-1-step": lambda: Fcfs(FcfsOptions(decode_steps_when_waiting=1)),
    "priority-quick": lambda: Priority(PriorityOptions(ageing_s=0.1)),
    "priority-keep": lambda: Priority(PriorityOptions(ageing_s=1e6, displace=False)),
    "fair-free-prompts": lambda: Fair(FairOptions(input_weight=0, max_wait_s=0)),
    "sjf-impatient": lambda: Sjf(SjfOptions(max_wait_s=0.02)),
    "prefix_aware-impatient": lambda: PrefixAware(PrefixAwareOptions(max_wait_s=0.02)),
    "static_batch-of-3": lambda: StaticBatch(StaticBatchOptions(batch_size=3)),
}
SETTINGS = ("rows", "pool", "pages")


def checks() -> Iterator[Any]:
    """Every check with other options; with the default ones tests/conformance runs them.

    The state machine runs in one setting for each, and in the other two where there is more time.
    """
    for number, (name, make) in enumerate(MAKERS.items()):
        for what, check in scheduler_checks(make):
            if (name, what) == ("priority-keep", "no_request_starves_in_a_flood[urgent]"):
                continue  # it takes its time
            is_quick = "invariants_hold" not in what or SETTINGS[number % 3] in what
            yield pytest.param(
                check, id=f"{name}-{what}", marks=() if is_quick else pytest.mark.slow
            )


@pytest.mark.parametrize("check", list(checks()))
def test_scheduler_keeps_the_contract(check: Callable[[], None]) -> None:
    check()


def waiting(name: str, num_prompt: int, arrival_s: float = 0.0) -> WaitingView:
    return WaitingView(name, num_prompt, 20, arrival_s)


def decoding(
    name: str, max_new_left: int = 20, arrival_s: float = 0.0, num_promised: int | None = None
) -> RunningView:
    return RunningView(name, 10, 0, max_new_left, arrival_s, num_promised=num_promised)


def prefilling(name: str, num_left: int, arrival_s: float = 0.0) -> RunningView:
    return RunningView(name, 50, num_left, 20, arrival_s)


def decide(
    scheduler: Scheduler,
    wait: tuple[WaitingView, ...],
    run: tuple[RunningView, ...],
    *,
    free_rows: int = 4,
    free_tokens: int = 1000,
) -> Decision:
    view = SchedulerView(0.0, wait, run, Limits(8, 32, 16, free_rows, free_tokens))
    return scheduler.decide(view, scheduler.initial_state())[0]


def test_fcfs_cuts_a_long_prompt_to_the_rest_of_the_budget() -> None:
    decision = decide(
        Fcfs(), (waiting("c", 100), waiting("d", 1)), (decoding("a"), prefilling("b", 9))
    )
    assert decision == Decision(prefill=(("b", 9), ("c", 22)), decode=("a",), decode_steps=4)


def test_fcfs_continues_prompts_in_order_of_arrival() -> None:
    decision = decide(Fcfs(), (), (prefilling("late", 20, 2.0), prefilling("early", 20, 1.0)))
    assert decision.prefill == (("early", 20), ("late", 12))


def test_fcfs_lets_nobody_overtake_the_head_of_the_line() -> None:
    decision = decide(Fcfs(), (waiting("large", 30), waiting("small", 1)), (), free_tokens=30)
    assert decision.prefill == ()


def test_fcfs_admits_what_free_rows_and_cache_allow() -> None:
    line = tuple(waiting(name, 5) for name in "abcd")
    assert decide(Fcfs(), line, (), free_rows=2).prefill == (("a", 5), ("b", 5))
    assert decide(Fcfs(), line, (), free_tokens=18).prefill == (("a", 5), ("b", 5), ("c", 5))
    assert decide(Fcfs(), line, (), free_tokens=17).prefill == (("a", 5), ("b", 5))


def test_fcfs_runs_the_last_token_of_a_cached_prompt() -> None:
    view = WaitingView("a", 30, 20, 0.0, num_cached_tokens=30)
    assert decide(Fcfs(), (view,), ()).prefill == (("a", 1),)


@pytest.mark.parametrize(
    ("wait", "run", "free_rows", "steps"),
    [
        ((), (decoding("a"), decoding("b", 3)), 4, 16),
        ((), (decoding("a", 5),), 4, 5),
        ((), (decoding("a"), prefilling("b", 40)), 4, 4),
        ((waiting("c", 90),), (decoding("a"),), 4, 4),
        ((waiting("c", 5),), (decoding("a"), decoding("b", 6)), 0, 6),
        ((waiting("c", 5),), (decoding("a"), decoding("b", 1)), 0, 4),
        ((waiting("c", 5),), (decoding("a"), decoding("b")), 0, 16),
    ],
)
def test_fcfs_takes_many_decode_steps_only_when_nobody_could_start(
    wait: tuple[WaitingView, ...], run: tuple[RunningView, ...], free_rows: int, steps: int
) -> None:
    assert decide(Fcfs(), wait, run, free_rows=free_rows).decode_steps == steps


def test_fcfs_preempts_the_latest_arrival_when_cache_is_short() -> None:
    run = (
        decoding("late", arrival_s=2.0, num_promised=9),
        decoding("early", arrival_s=1.0, num_promised=9),
    )
    decision = decide(Fcfs(), (waiting("new", 1),), run, free_tokens=1)
    assert (decision.preempt, decision.decode, decision.prefill) == (("late",), ("early",), ())
    assert decide(Fcfs(), (), run, free_tokens=2).preempt == ()
    alone = (decoding("early", num_promised=9),)
    assert decide(Fcfs(), (), alone, free_tokens=0) == Decision(decode=("early",), decode_steps=1)


def test_fcfs_gives_up_a_row_that_is_ending_before_one_that_has_work_left() -> None:
    run = (
        decoding("ending", 0, arrival_s=0.0, num_promised=9),
        decoding("early", arrival_s=1.0, num_promised=9),
        decoding("late", arrival_s=2.0, num_promised=9),
    )
    decision = decide(Fcfs(), (), run, free_tokens=0)
    assert (decision.preempt, decision.decode) == (("ending",), ("early", "late"))


def test_fcfs_takes_no_more_steps_than_the_cache_has_room_for() -> None:
    run = (decoding("a", num_promised=10), decoding("b", num_promised=10))
    assert decide(Fcfs(), (), run, free_tokens=7).decode_steps == 4


def test_preempted_request_ends_and_first_arrival_is_never_preempted() -> None:
    world = LoopSimulation(Fcfs(), SchedulerLimits(max_num_seqs=8, num_cache_tokens=60, grows=True))
    names = [world.add(5, 30) for _ in range(6)]
    preempted: list[str] = []
    while world.waiting or world.running:
        preempted += world.act().preempt
        assert world.num_decisions < 500
    assert preempted
    assert names[0] not in preempted
    assert set(names) == world.ended.keys()


def test_static_batch_admits_nobody_until_the_batch_has_ended() -> None:
    world = LoopSimulation(StaticBatch(StaticBatchOptions(batch_size=3)), ROWS)
    first = [world.add(20, 3 + i) for i in range(3)]
    later = world.add(4, 4)
    while later in world.waiting:
        decision = world.act()
        assert not (decision.prefill and decision.decode), (
            "the batch is prefilled before it is decoded"
        )
    assert set(first) == world.ended.keys()
    world.finish(10)


def test_static_batch_prefills_its_whole_batch_in_chunks() -> None:
    world = LoopSimulation(StaticBatch(), ROWS)
    names = [world.add(20, 4) for _ in range(4)]
    prefills = [world.act().prefill for _ in range(3)]
    assert prefills[0] == ((names[0], 20), (names[1], 12))
    assert prefills[1] == ((names[1], 8), (names[2], 20), (names[3], 4))
    assert prefills[2] == ((names[3], 16),)
    assert world.act().decode == tuple(names)


def test_static_batch_goes_on_where_the_cache_gives_out_whole_pages() -> None:
    world = LoopSimulation(
        StaticBatch(), SchedulerLimits(num_cache_tokens=64, grows=True, page_size=16)
    )
    names = [world.add(15, 15) for _ in range(2)] + [world.add(1, 1), world.add(1, 1)]
    world.finish(100)
    assert set(names) == world.ended.keys()


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        (FcfsOptions, "decode_steps_when_waiting", 0),
        (PriorityOptions, "ageing_s", 0.0),
        (FairOptions, "output_weight", 0.0),
        (FairOptions, "input_weight", -1.0),
        (SjfOptions, "max_wait_s", -1.0),
        (PrefixAwareOptions, "max_wait_s", float("inf")),
        (StaticBatchOptions, "batch_size", 0),
    ],
)
def test_options_refuse_what_they_do_not_know(
    options: Callable[..., object], field: str, value: float
) -> None:
    for fields in ({"unknown": 1}, {field: value}):
        with pytest.raises(ValidationError):
            options(**fields)


class Wrong(Scheduler):
    """fcfs with one promise broken."""

    def __init__(self, change: Callable[[Decision, SchedulerView], Decision]) -> None:
        self._change = change

    def initial_state(self) -> None:
        """None."""

    def decide(self, view: SchedulerView, state: None) -> tuple[Decision, None]:
        return self._change(Fcfs().decide(view, state)[0], view), None


def _more(prefill: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    return tuple((name, num + 1) for name, num in prefill)


def _latest_first(view: SchedulerView) -> Decision:
    return Fcfs().decide(dataclasses.replace(view, waiting=view.waiting[::-1]), None)[0]


def _over_the_cache(decision: Decision, view: SchedulerView) -> Decision:
    """As many decode steps as the engine allows, whatever they need."""
    steps = min(
        view.limits.max_decode_steps, max((row.max_new_left for row in view.running), default=1)
    )
    return dataclasses.replace(decision, decode_steps=max(1, steps))


WRONG: dict[str, Callable[[Decision, SchedulerView], Decision]] = {
    "idle": lambda _, __: Decision(),
    "drops the last decode": lambda decision, _: dataclasses.replace(
        decision, decode=decision.decode[:-1]
    ),
    "never preempts": lambda decision, _: dataclasses.replace(decision, preempt=()),
    "over the cache": _over_the_cache,
    "too many steps": lambda decision, _: dataclasses.replace(decision, decode_steps=1000),
    "one token too many": lambda decision, _: dataclasses.replace(
        decision, prefill=_more(decision.prefill)
    ),
    "latest first": lambda _, view: _latest_first(view),
}


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ("idle", "everything_ends[rows]"),
        pytest.param("drops the last decode", "invariants_hold[rows]", marks=pytest.mark.long),
        ("never preempts", "everything_ends[tight_pool]"),
        ("over the cache", "everything_ends[pool]"),
        ("too many steps", "invariants_hold[pool]"),
        ("one token too many", "invariants_hold[pool]"),
        ("latest first", "no_request_starves_in_a_flood[short]"),
        ("latest first", "order_is_kept[arrival-rows]"),
    ],
)
def test_suite_finds_a_wrong_scheduler(wrong: str, name: str) -> None:
    check = dict(scheduler_checks(lambda: Wrong(WRONG[wrong]), "arrival"))[name]
    with pytest.raises(AssertionError, match=r"\w"):
        check()


@pytest.mark.parametrize(
    ("make", "flood"),
    [
        (lambda: Priority(PriorityOptions(ageing_s=1e6)), "urgent"),
        (lambda: Sjf(SjfOptions(max_wait_s=1e6)), "short"),
        (lambda: PrefixAware(PrefixAwareOptions(max_wait_s=1e6)), "cached"),
    ],
    ids=["priority", "sjf", "prefix_aware"],
)
def test_suite_finds_who_starves_when_waiting_counts_for_nothing(
    make: Callable[[], Scheduler], flood: str
) -> None:
    with pytest.raises(AssertionError, match="has not ended after 600 decisions"):
        dict(scheduler_checks(make))[f"no_request_starves_in_a_flood[{flood}]"]()


class Remembers(Scheduler):
    """fcfs with a state that it should not have."""

    def __init__(self, remember: Callable[[Any, SchedulerView], Any]) -> None:
        self._remember = remember

    def initial_state(self) -> tuple[str, ...]:
        return ()

    def decide(self, view: SchedulerView, state: Any) -> tuple[Decision, Any]:
        return Fcfs().decide(view, None)[0], self._remember(state, view)


@pytest.mark.parametrize(
    ("remember", "complaint"),
    [
        (lambda state, _: [*state], "the state is mutable"),
        (
            lambda state, view: (*state, *(w.request_id for w in view.waiting)),
            "requests that have ended",
        ),
    ],
)
def test_suite_finds_a_wrong_state(
    remember: Callable[[Any, SchedulerView], Any], complaint: str
) -> None:
    with pytest.raises(AssertionError, match=complaint):
        dict(scheduler_checks(lambda: Remembers(remember)))["everything_ends[rows]"]()


def test_suite_names_the_orders_that_can_be_promised() -> None:
    with pytest.raises(AssertionError, match="order 'random' is not among arrival, priority"):
        dict(scheduler_checks(Fcfs, "random"))["order_is_kept[random-rows]"]()


def test_schedulers_do_not_import_jax() -> None:
    files = Path(enginebay_schedulers.__file__).parent.glob("*.py")
    modules = sorted(path.stem for path in files if path.stem != "__init__")
    assert {"fcfs", "static_batch"} < set(modules)
    names = ", ".join(f"enginebay_schedulers.{name}" for name in modules)
    code = f"import sys, {names}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
