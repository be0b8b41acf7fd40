"""Which steps the loop launches and reads, and in which order, on the fake engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from enginebay.compose.composition import Composed
from enginebay.contracts.engine import StepPlan
from enginebay.errors import InternalError
from enginebay.serving.running import Running
from tests.fake_engine import NUM_SPECIAL
from tests.fakes import expected_tokens
from tests.pool import EnginePool
from tests.unit.loops import (
    OPTIONS,
    Loops,
    Pauses,
    composed,
    events,
    go_on,
    request,
    running,
    seeing,
    tokens,
)


@pytest.fixture(params=["vinference", "oengine"])
def parts(request: pytest.FixtureRequest, engine_pool: EnginePool) -> Iterator[Composed]:
    with composed(engine_pool, "fake", request.param, **OPTIONS[request.param]) as made:
        yield made


@pytest.fixture
def start(parts: Composed) -> Iterator[Loops]:
    yield from running(parts)


class FailsBefore:
    """The first decode step that is read after a second prompt was launched fails, with that
    prompt's step behind it.
    """

    def __init__(self) -> None:
        self.launched: list[StepPlan] = []
        self.behind: list[StepPlan] = []
        self.num_read_behind = 0

    def launch(self, plan: StepPlan) -> None:
        self.launched.append(plan)

    def read(self, plan: StepPlan) -> None:
        self.num_read_behind += any(plan is one for one in self.behind)
        num_prompts = sum(not one.is_decode for one in self.launched)
        if plan.is_decode and num_prompts == 2 and not self.behind:
            at = next(i for i, one in enumerate(self.launched) if one is plan)
            self.behind = self.launched[at + 1 :]
            raise RuntimeError("the device is gone")


def test_steps_behind_a_failed_one_are_never_read(start: Loops) -> None:
    loop, fails = start(), FailsBefore()
    pauses = Pauses(loop, after=3)
    with seeing(loop.engine, lambda plan: (fails.launch(plan), pauses(plan)), fails.read):
        (unlucky,) = loop.submit([request("unlucky", max_tokens=150)])
        pauses.wait()
        (other,) = loop.submit([request("other", max_tokens=20)])
        go_on(loop)
        assert isinstance(events(unlucky)[-1].error, InternalError)
        assert tokens(other) == expected_tokens(request("other", max_tokens=20))
    assert fails.behind
    assert fails.num_read_behind == 0
    loop.call(start.check)


def order_of_steps(start: Loops, **changes: Any) -> list[str]:
    """What is launched and read from the moment on in which a second request joins one that
    runs.
    """
    loop, seen = start(**changes), []
    pauses = Pauses(loop, after=3)

    def note(what: str, plan: StepPlan) -> None:
        seen.append(f"{what} {'decode' if plan.is_decode else 'prefill'}")

    with seeing(
        loop.engine,
        lambda plan: (note("launch", plan), pauses(plan)),
        lambda plan: note("read", plan),
    ):
        (first,) = loop.submit([request("first", max_tokens=100)])
        pauses.wait()
        (second,) = loop.submit([request("second", max_tokens=20)])
        go_on(loop)
        tokens(second)
        tokens(first)
    joined = [i for i, step in enumerate(seen) if step == "launch prefill"][1]
    return seen[joined:]


def test_prompts_and_decoding_rows_are_launched_before_either_is_read(start: Loops) -> None:
    assert order_of_steps(start)[:2] == ["launch prefill", "launch decode"]


def test_without_overlap_each_step_is_read_before_the_next(start: Loops) -> None:
    order = order_of_steps(start, overlap_execution=False)
    assert order[::2] == [step for step in order if step.startswith("launch")]
    assert order[1::2] == [step.replace("launch", "read") for step in order[::2]]


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_a_request_counts_its_tokens_to_its_length_and_no_further(max_tokens: int) -> None:
    """A loop whose count is wrong, or other than the device's, launches nothing and waits."""
    state = Running(request("counted", max_tokens=max_tokens))
    for left in range(max_tokens, 0, -1):
        assert state.finish_reason() is None
        assert (state.num_new_left, state.max_steps(3)) == (left, min(left, 3))
        state.num_launched += 1
        state.output.append(NUM_SPECIAL)
    assert (state.finish_reason(), state.num_new_left) == ("length", 0)
