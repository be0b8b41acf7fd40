"""The serving loop on real engines: threads, failures and preemption. The rest is in
test_loop.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from enginebay.compose.composition import Composed
from enginebay.errors import InternalError, StoppedError
from enginebay.serving.running import Running
from tests.pool import EnginePool
from tests.unit.loops import (
    MAX_NUM_SEQS,
    OPTIONS,
    FailsOnce,
    Loops,
    Preempting,
    all_tokens,
    alone,
    composed,
    events,
    held,
    request,
    running,
    seeing,
    tokens,
)

pytestmark = pytest.mark.xdist_group("tiny")


@pytest.fixture(params=[pytest.param("vinference", marks=pytest.mark.long), "oengine"])
def parts(request: pytest.FixtureRequest, engine_pool: EnginePool) -> Iterator[Composed]:
    with composed(engine_pool, "real", request.param, **OPTIONS[request.param]) as made:
        yield made


@pytest.fixture
def start(parts: Composed) -> Iterator[Loops]:
    """Starts loops, ends them, and looks at the books."""
    yield from running(parts)


@pytest.mark.long
def test_requests_from_many_threads_all_get_their_own_tokens(start: Loops, parts: Composed) -> None:
    requests = [request(f"thread {i}", length=3 + 5 * i, max_tokens=6 + i) for i in range(6)]
    expected = alone(parts, requests)
    loop = start()
    with ThreadPoolExecutor(len(requests)) as pool:
        got = list(pool.map(lambda one: tokens(loop.submit([one])[0]), requests))
    assert got == expected
    assert [len(one) for one in got] == [6, 7, 8, 9, 10, 11]


@pytest.mark.long
@pytest.mark.parametrize("when", ["launch", "read"])
def test_after_a_failed_step_others_have_the_tokens_of_fresh_arrays(
    start: Loops, parts: Composed, when: str
) -> None:
    expected = alone(parts, [request("after")])
    loop = start()
    with seeing(loop.engine, **{when: FailsOnce()}):
        with held(loop):
            tickets = loop.submit(
                [request(f"unlucky {i}", max_tokens=30) for i in range(MAX_NUM_SEQS)]
            )
            waiting = loop.submit([request("after")])
        for ticket in tickets:
            assert isinstance(events(ticket)[-1].error, InternalError)
        assert all_tokens(waiting) == expected
    loop.call(start.check)


@pytest.mark.long
def test_an_engine_that_cannot_begin_anew_tells_everybody(
    start: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = start()
    late: list[Running] = []

    def out_of_memory() -> None:
        late.extend(loop.submit([request("late")]))
        raise MemoryError("no room")

    with seeing(loop.engine, launch=FailsOnce()), monkeypatch.context() as patch:
        patch.setattr(loop.engine, "make_arrays", out_of_memory)
        with held(loop):
            tickets = loop.submit([request(f"unlucky {i}") for i in range(MAX_NUM_SEQS + 2)])
        for ticket in tickets:
            assert isinstance(events(ticket)[-1].error, InternalError)
        loop.close()
        assert isinstance(events(late[0])[-1].error, InternalError)
        given = r"the engine broke down .MemoryError: no room.: make a new one"
        with pytest.raises(StoppedError, match=given):
            loop.submit([request("later")])
    loop.engine.make_arrays()


@pytest.mark.parametrize(
    ("after", "temperature"), [(1, 0.9), pytest.param(6, 0.0, marks=pytest.mark.long)]
)
def test_a_preempted_request_finishes_with_the_same_tokens(
    start: Loops, parts: Composed, after: int, temperature: float
) -> None:
    lengths = [4 + 9 * i for i in range(MAX_NUM_SEQS + 1)]
    requests = [request(f"row {i}", n, temperature=temperature) for i, n in enumerate(lengths)]
    expected = alone(parts, requests)
    scheduler = Preempting(parts.scheduler, after)
    assert all_tokens(start(scheduler).submit(requests)) == expected
    assert scheduler.preempted == {one.request_id for one in requests}
