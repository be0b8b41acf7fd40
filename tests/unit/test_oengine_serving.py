"""The serving loop on too few pages: aborts, failures and stubborn schedulers leak and stall
nothing.
"""

from __future__ import annotations

import dataclasses
import queue
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from enginebay.compose.composition import Composed
from enginebay.contracts.engine import StepPlan
from enginebay.contracts.scheduler import Decision, Scheduler, SchedulerView
from enginebay.errors import InternalError, RequestError
from enginebay.serving.loop import EngineLoop
from enginebay.serving.running import Running
from enginebay.types import Request
from enginebay_oengine import SequenceBuffer
from tests.fakes import expected_tokens
from tests.pool import EnginePool
from tests.unit.loops import (
    PAGED,
    FailsOnce,
    Loops,
    Once,
    Pauses,
    Prefilled,
    Unread,
    alike,
    all_tokens,
    composed,
    events,
    family,
    go_on,
    held,
    is_decode,
    running,
    seeing,
    tokens,
)
from tests.unit.serving import DEADLOCK_S, within_minutes

REAL = pytest.param("real", marks=pytest.mark.xdist_group("tiny"))


@pytest.fixture(params=["fake"])
def parts(request: pytest.FixtureRequest, engine_pool: EnginePool) -> Iterator[Composed]:
    """The fake engine, or, for tests that ask for it, the real one of the pool."""
    with composed(engine_pool, request.param, "oengine", **PAGED) as made:
        yield made


@pytest.fixture
def start(parts: Composed) -> Iterator[Loops]:
    """Starts loops, ends them, and looks at the books."""
    yield from running(parts)


def expected(requests: list[Request]) -> list[list[int]]:
    """What the fake engine gives."""
    return [expected_tokens(one) for one in requests]


class NeverPreempts(Scheduler):
    """Decides like another one, but takes nobody's row away.

    Instead it runs the rows that have cache for their next token, if there are any, or (`insists`)
    those that have none.
    """

    def __init__(self, inner: Scheduler, *, insists: bool) -> None:
        self.inner, self.insists = inner, insists

    def initial_state(self) -> Any:
        return self.inner.initial_state()

    def decide(self, view: SchedulerView, state: Any) -> tuple[Decision, Any]:
        decision, state = self.inner.decide(view, state)
        if not decision.preempt:
            return decision, state
        if self.insists:
            return dataclasses.replace(decision, preempt=()), state
        able = [r for r in view.running if not r.num_left and r.num_tokens <= (r.num_promised or 0)]
        return Decision(decode=tuple(row.request_id for row in able if row.max_new_left)), state


@within_minutes
@pytest.mark.parametrize(("count", "max_tokens"), [(2, 120), (6, 60)])
@pytest.mark.parametrize("insists", [False, True])
def test_a_scheduler_that_never_preempts_cannot_stall_the_loop(
    start: Loops, parts: Composed, insists: bool, count: int, max_tokens: int
) -> None:
    requests = [alike(f"r{i}", 30 + i, max_tokens) for i in range(count)]
    loop = start(NeverPreempts(parts.scheduler, insists=insists))
    assert all_tokens(loop.submit(requests)) == expected(requests)


def test_what_was_generated_is_found_like_a_prompt(start: Loops) -> None:
    loop, prefilled = start(), Prefilled()
    first = alike("first", 40, 9)
    (found,) = all_tokens(loop.submit([first]))
    prompt = np.concatenate([first.prompt_token_ids, np.asarray([*found, 5, 6], np.int32)])
    longer = dataclasses.replace(first, request_id="longer", prompt_token_ids=prompt)
    with seeing(loop.engine, launch=prefilled):
        ticket = loop.submit([longer])[0]
        told = events(ticket)
    assert told[-1].metrics is not None
    assert (told[-1].metrics.num_cached_tokens, sum(prefilled.counts)) == (48, 3)
    assert [token for event in told for token in event.token_ids] == expected_tokens(longer)


def test_aborting_frees_pages_before_the_next_step(start: Loops) -> None:
    loop = start()
    pauses = Pauses(loop, after=4)
    with seeing(loop.engine, launch=pauses):
        tickets = loop.submit([alike(f"long {i}", 10 + i, 150) for i in range(3)])
        assert tickets[0].get(DEADLOCK_S).token_ids
        pauses.wait()
        for i in range(3):
            loop.abort(f"long {i}")
        loop.call(start.check)
    assert {events(ticket)[-1].finish_reason for ticket in tickets} == {"abort"}


@within_minutes
def test_a_request_that_can_never_fit_does_not_wait(start: Loops) -> None:
    never, fits = start().submit([alike("never", 100, 100), alike("fits", 100, 5)])
    (last,) = events(never)
    assert last.finish_reason == "error"
    assert isinstance(last.error, RequestError)
    assert len(tokens(fits)) == 5


@pytest.mark.parametrize("parts", ["fake", REAL], indirect=True)
def test_what_a_failed_step_computed_is_not_found_again(start: Loops) -> None:
    loop = start()
    (first,) = all_tokens(loop.submit([alike("first", 40, 12)]))
    with seeing(loop.engine, launch=FailsOnce()):
        assert isinstance(
            events(loop.submit([alike("unlucky", 40, 12)])[0])[-1].error, InternalError
        )
    after = events(loop.submit([alike("after", 40, 12)])[0])
    assert [token for event in after for token in event.token_ids] == first
    assert after[-1].metrics is not None
    assert after[-1].metrics.num_cached_tokens == 0


def test_a_prompt_that_other_weights_computed_is_computed_again(
    start: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, found = start(), []
    for number, version in enumerate(("old", "old", "new")):
        monkeypatch.setattr(type(loop.engine), "weights_version", version)
        last = events(loop.submit([alike(f"r{number}", 40, 12)])[0])[-1]
        assert last.metrics is not None
        found.append(last.metrics.num_cached_tokens > 0)
    assert found == [False, True, False]


@pytest.mark.parametrize("overlap", [True, False])
def test_row_table_has_the_pages_of_each_row(start: Loops, overlap: bool) -> None:
    """While rows grow, share pages, are preempted and end; a row that is free has none."""
    loop, seen = start(overlap_execution=overlap), 0
    table = loop.engine.rows.page_tables[0]

    def look(plan: StepPlan) -> None:
        nonlocal seen
        for row in plan.rows:
            num_pages = int(table.num_pages[row.row])
            assert tuple(table.page_ids[row.row, :num_pages].tolist()) == row.lease.pages["full"]
            assert not table.page_ids[row.row, num_pages:].any()
            seen = max(seen, num_pages)

    requests = [alike(f"r{i}", 30 + i, 60) for i in range(6)] + family("c", 21, 9, 3)
    with seeing(loop.engine, launch=look):
        assert all_tokens(loop.submit(requests)) == expected(requests)
    assert seen == 12
    assert not loop.call(lambda: table.num_pages.any() or table.page_ids.any())


@pytest.mark.parametrize("parts", ["fake", REAL], indirect=True)
def test_a_documented_view_shows_what_a_serving_engine_has(start: Loops) -> None:  # holds B01
    """Its columns are the table's own arrays, or made of the requests that run."""
    loop = start()
    table, seen = loop.engine.rows, 0
    view = SequenceBuffer.of(table)
    arrays = [array for array in vars(view).values() if isinstance(array, np.ndarray)]
    assert all(any(array is own for own in vars(table).values()) for array in arrays)

    def look(plan: StepPlan) -> None:
        nonlocal seen
        for row in plan.rows:
            request, length = view.request(row.row), int(view.num_tokens[row.row])
            prompt = request.prompt_token_ids.tolist()
            assert view.token_ids[row.row, : len(prompt)].tolist() == prompt
            assert length >= len(prompt)
            assert view.get_active_sampling_params(row.row)["temperature"] == 0.5
            assert tuple(view.keys[row.row].tolist()) == request.key
            assert view.row_of(request.request_id) == row.row
            seen += 1
        assert (view.all_greedy, view.all_random, view.no_penalties) == (False, True, True)
        assert {info.row for info in view.prepare_batch().decode_rows} <= {*view.taken_rows}

    requests = [alike(f"r{i}", 20 + i, 8, temperature=0.5) for i in range(3)]
    with seeing(loop.engine, launch=look):
        all_tokens(loop.submit(requests))
    assert seen >= 6
    assert not loop.call(lambda: view.num_reqs or view.temperature.any())


def test_a_failing_step_of_aborted_requests_fails_no_other(start: Loops) -> None:
    """All its rows were aborted before it was read. Who came meanwhile has the row of one, and
    begins again.
    """
    loop = start()
    fails = FailsOnce()
    came: list[Running] = []

    def meanwhile() -> None:
        loop.abort("aborted")
        came.extend(loop.submit([alike("after", 40, 12)]))

    with seeing(loop.engine, launch=Once(meanwhile, is_decode), read=fails):
        assert events(loop.submit([alike("aborted", 30, 50)])[0])[-1].finish_reason == "abort"
        assert tokens(came[0]) == expected_tokens(alike("after", 40, 12))
    assert fails.has_failed


@pytest.mark.parametrize(
    ("parts", "overlap"),
    [("fake", True), ("fake", False), pytest.param("real", True, marks=REAL.marks)],
    indirect=["parts"],
)
def test_a_step_that_fails_fails_its_own_requests_alone(start: Loops, overlap: bool) -> None:
    """Others lose what they had in the arrays, are computed again, and get the same tokens."""
    loop = start(overlap_execution=overlap)
    requests = [alike(f"lucky {i}", 20 + i, 40) for i in range(3)]
    first = all_tokens(loop.submit(requests))
    rows = loop.engine.rows

    def is_the_unlucky_ones(plan: StepPlan) -> bool:
        return not plan.is_decode and any(
            rows.request(r.row).request_id == "unlucky" for r in plan.rows
        )

    pauses = Pauses(loop, after=4)
    with seeing(loop.engine, launch=pauses, read=FailsOnce(is_the_unlucky_ones)):
        lucky = loop.submit(requests)
        pauses.wait()
        unlucky = loop.submit([alike("unlucky", 30, 5)])[0]
        go_on(loop)
        error = events(unlucky)[-1].error
        assert isinstance(error, InternalError)
        assert "the device is gone" in str(error)
        assert all_tokens(lucky) == first


def test_steps_are_read_as_fast_as_they_are_launched(start: Loops) -> None:
    """Also while every decision launches a prefill and a decode: tokens come when they are there,
    not many steps later.
    """
    loop, unread = start(), Unread()
    requests = [alike(f"r{i}", 60 + i, 3 + i % 5) for i in range(24)]
    with seeing(loop.engine, unread.launch, unread.read):
        assert all_tokens(loop.submit(requests)) == expected(requests)
    assert unread.most <= 2, f"{unread.most} steps were not read when another one was launched"


def test_without_overlap_each_step_is_read_before_the_next_is_launched(start: Loops) -> None:
    """Also where one decision launches several: prompts of several completions beside decoding
    rows.
    """
    requests = [alike(f"r{i}", 60 + i, 3 + i % 5) for i in range(8)]
    requests += [one for p in range(3) for one in family(str(p), 20 + p, 6, 3, temperature=0.0)]
    loop, unread = start(overlap_execution=False), Unread()
    with seeing(loop.engine, unread.launch, unread.read):
        assert all_tokens(loop.submit(requests)) == expected(requests)
    assert unread.most == 0, "a step is launched before the one before it was read"


def run_with_random_aborts(loop: EngineLoop, count: int, seed: int) -> tuple[int, int]:
    """Of requests of random lengths a third is aborted, half of them while they wait. How many were
    aborted while they waited, and how many ended early.
    """
    chance = random.Random(seed)
    requests = [
        alike(f"{seed}/{i}", chance.randint(1, 90), chance.randint(1, 60)) for i in range(count)
    ]
    doomed = {one.request_id for one in requests if chance.random() < 0.33}
    waiting = {one for one in sorted(doomed) if chance.random() < 0.5}

    def abort(ticket: Running) -> None:
        loop.abort(ticket.request.request_id)
        loop.call(loop.engine.ledger.check)

    tickets: list[Running] = []
    for first in range(0, count, 10):
        with held(loop):  # rows of those before are decoding
            new = loop.submit(requests[first : first + 10])
            for ticket in new:
                if ticket.request.request_id in waiting:
                    abort(ticket)
        for ticket in new:
            if ticket.request.request_id in doomed - waiting:
                ticket.get(DEADLOCK_S)
                abort(ticket)
        tickets += new
    num_early = 0
    for ticket in tickets:
        if ticket.request.request_id in doomed:
            num_early += ends_early(ticket)
        else:
            assert tokens(ticket) == expected_tokens(ticket.request)
    return len(waiting), num_early


def ends_early(ticket: Running) -> bool:
    """Whether a request was aborted before its own end. Its last event may have been taken."""
    try:
        while (event := ticket.get_nowait()).finish_reason is None:
            pass
    except queue.Empty:
        return False
    return event.finish_reason == "abort"


def test_random_requests_and_aborts_leak_no_page(start: Loops) -> None:
    loop = start()
    for seed in range(8):
        num_waiting, num_early = run_with_random_aborts(loop, 60, seed)
        assert num_early >= num_waiting > 0
