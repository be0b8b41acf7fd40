"""bench serve: when requests are sent, on an event loop whose clock is virtual, and the search for
the highest rate on a queue whose capacity is known.
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from enginebay_bench.serve.arrivals import closed_loop, open_loop, poisson_offsets
from enginebay_bench.serve.bounds import parse_bounds
from enginebay_bench.serve.figures import ClientCost, ServeFigures, make_figures
from enginebay_bench.serve.find_rate import CLOSE, find_rate
from enginebay_bench.serve.timeline import RequestTimeline

TICK_S = 1e-6


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes when it waits, and a microsecond when its time is read."""

    def __init__(self) -> None:
        super().__init__(WaitingSelector(self))
        self.now_s = 0.0

    def time(self) -> float:
        self.now_s += TICK_S
        return self.now_s


class WaitingSelector(selectors.DefaultSelector):
    """Adds a wait to the clock of its loop, and waits for nothing."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        self._loop.now_s += timeout or 0.0
        return super().select(0)


def run(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work)


class Server:
    """Serves `num_slots` requests at a time in order of arrival. Each takes `first_s` until its
    first chunk, and `token_s` for each of the `num_tokens - 1` others.
    """

    def __init__(self, num_slots: int, first_s: float, token_s: float, num_tokens: int) -> None:
        self._slots = asyncio.Semaphore(num_slots)
        self._first_s, self._token_s, self._num_tokens = first_s, token_s, num_tokens
        self.timelines: list[RequestTimeline] = []

    async def send(self, index: int, due_s: float) -> None:
        loop = asyncio.get_running_loop()
        timeline = RequestTimeline(index, due_s, loop.time(), num_tokens=self._num_tokens)
        self.timelines.append(timeline)
        async with self._slots:
            await asyncio.sleep(self._first_s)
            timeline.chunk_s.append(loop.time())
            for _ in range(self._num_tokens - 1):
                await asyncio.sleep(self._token_s)
                timeline.chunk_s.append(loop.time())
        timeline.ended_s = loop.time()

    def figures(self, rate: float) -> ServeFigures:
        return make_figures(self.timelines, ClientCost(0.0, [0.0]), rate=rate)


def test_open_loop_sends_on_schedule_whatever_is_answered() -> None:
    server = Server(1, first_s=10.0, token_s=0.0, num_tokens=1)
    offsets = poisson_offsets(20, 4.0, seed=3)
    run(open_loop(server.send, offsets))
    due = [one.due_s - server.timelines[0].due_s for one in server.timelines]
    assert due == pytest.approx(offsets)
    assert all(0 <= one.lag_s < 1e-3 for one in server.timelines)
    # Request i waits for i others: the wait is part of its latency.
    waits = [one.ttft_s for one in server.timelines]
    wanted = [10.0 * (i + 1) - offset for i, offset in enumerate(offsets)]
    assert waits == pytest.approx(wanted, abs=0.01)


def test_a_client_that_is_late_counts_its_lag_as_latency() -> None:
    server = Server(9, first_s=0.1, token_s=0.0, num_tokens=1)

    async def blocked(index: int, due_s: float) -> None:
        if index == 0:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            loop.now_s += 5.0  # as if this process had stood still
        await server.send(index, due_s)

    run(open_loop(blocked, [0.0, 1.0, 2.0]))
    figures = server.figures(1.0)
    assert figures.lag_s is not None
    assert figures.lag_s.max == pytest.approx(5.0, abs=0.01)
    assert [one.ttft_s for one in server.timelines] == pytest.approx([5.1, 4.1, 3.1], abs=0.01)
    assert figures.is_client_slow


def test_closed_loop_keeps_the_concurrency() -> None:
    server = Server(99, first_s=0.5, token_s=0.1, num_tokens=6)
    run(closed_loop(server.send, 40, 8))
    figures = server.figures(1.0)
    assert [one.index for one in server.timelines] == list(range(40))
    assert figures.max_in_flight == 8
    assert figures.duration_s == pytest.approx(5.0, abs=0.01)  # five rounds of a second
    assert figures.output_tokens_per_s == pytest.approx(48.0, rel=0.01)
    assert figures.mean_in_flight == pytest.approx(8.0, rel=0.01)


def test_latencies_of_a_paced_server_are_its_pace() -> None:
    server = Server(99, first_s=0.25, token_s=0.02, num_tokens=33)
    run(open_loop(server.send, poisson_offsets(50, 10.0, seed=0)))
    figures = server.figures(10.0)
    for summary, wanted in (
        (figures.ttft_s, 0.25),
        (figures.tpot_s, 0.02),
        (figures.itl_s, 0.02),
        (figures.e2e_s, 0.89),
    ):
        assert summary is not None
        assert (summary.p50, summary.p99) == pytest.approx((wanted, wanted), rel=0.01)


def test_arrivals_are_poisson_and_repeatable() -> None:
    offsets = poisson_offsets(20_000, 50.0, seed=7)
    gaps = np.diff(offsets)
    assert offsets[0] == 0.0
    assert gaps.mean() == pytest.approx(0.02, rel=0.03)
    assert gaps.std() == pytest.approx(0.02, rel=0.05)
    assert (gaps > 0.02).mean() == pytest.approx(np.exp(-1), rel=0.03)
    assert poisson_offsets(20_000, 50.0, seed=7) == offsets
    assert poisson_offsets(5, 100.0, seed=7) == pytest.approx([one / 2 for one in offsets[:5]])
    assert poisson_offsets(5, 50.0, seed=8)[1:] != offsets[1:5]


def queue(rate: float, num_requests: int) -> list[RequestTimeline]:
    """What ten slots do, each of which serves a request in half a second, first come first served.
    They serve 20 requests per second.
    """
    free_s, timelines = [0.0] * 10, []
    for index, due_s in enumerate(poisson_offsets(num_requests, rate, seed=1)):
        start_s = max(due_s, heapq.heappop(free_s))
        heapq.heappush(free_s, start_s + 0.5)
        times = (due_s, due_s, start_s + 0.5, [start_s + 0.1, start_s + 0.5])
        timelines.append(RequestTimeline(index, *times, num_tokens=2))
    return timelines


@pytest.mark.parametrize("first", [0.3, 4.0, 200.0])
def test_the_search_finds_the_capacity_of_a_server(first: float) -> None:
    measured: dict[float, float] = {}
    bounds = parse_bounds("ttft=1s", 0.9)

    def holds(rate: float) -> bool:
        figures = make_figures(queue(rate, 600), ClientCost(0.0, []), rate=rate, bounds=bounds)
        assert figures.good_share is not None
        measured[rate] = figures.good_share
        return figures.good_share >= 0.9

    def holds_alone() -> bool:
        assert not any(share >= 0.9 for share in measured.values()), "a rate has held"
        return True

    found = find_rate(holds, holds_alone, first)
    assert found.highest_held is not None
    assert found.lowest_failed is not None
    assert found.highest_held < found.lowest_failed <= CLOSE * found.highest_held
    assert 16 < found.highest_held < 24
    assert all((share >= 0.9) == (rate <= found.highest_held) for rate, share in measured.items())


def test_the_search_ends_without_a_rate_that_holds_or_fails() -> None:
    tried: list[float] = []
    alone = find_rate(lambda rate: bool(tried.append(rate)), lambda: False, 8.0)
    assert (alone.highest_held, alone.lowest_failed, tried) == (None, 8.0, [8.0])
    assert find_rate(lambda _: False, lambda: True, 1.0).highest_held is None
    always = find_rate(lambda _: True, lambda: True, 1.0)
    assert (always.highest_held, always.lowest_failed) == (2048.0, None)
