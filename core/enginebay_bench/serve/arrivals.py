"""When requests are sent: at the times of a schedule (open loop), or when another one has ended
(closed loop).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

SendRequest = Callable[[int, float], Awaitable[None]]
"""Sends the request of an index that was due at a time (seconds of the loop's clock), and returns
when its answer has ended. It raises nothing: a failure is part of the answer.
"""

SPIN_S = 0.0015
"""The event loop sleeps in whole milliseconds. The rest of a wait is spent in its other work."""


def poisson_offsets(num_requests: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start to each of `num_requests` arrivals of a Poisson process with `rate`
    arrivals per second; the first is at 0.

    The gaps of one seed are the same at every rate but for their scale, so two rates are compared
    on the same pattern of arrivals.
    """
    gaps = np.random.default_rng(seed).exponential(1.0, max(0, num_requests - 1))
    return [0.0, *(float(offset) for offset in np.cumsum(gaps) / rate)][:num_requests]


async def sleep_until(due_s: float) -> None:
    """Return at a time of the loop's clock, much closer to it than the loop's timers."""
    loop = asyncio.get_running_loop()
    left_s = due_s - loop.time()
    if left_s > SPIN_S:
        await asyncio.sleep(left_s - SPIN_S)
    while loop.time() < due_s:
        await asyncio.sleep(0)


async def open_loop(send: SendRequest, offsets: Sequence[float]) -> None:
    """Send request i at `offsets[i]` seconds from now, whatever has been answered until then.

    A request that is sent late still has its scheduled time, so the lag is part of its latency.
    """
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    async with asyncio.TaskGroup() as tasks:
        for index, offset in enumerate(offsets):
            await sleep_until(start_s + offset)
            tasks.create_task(_sent(send, index, start_s + offset))


async def closed_loop(send: SendRequest, num_requests: int, concurrency: int) -> None:
    """Keep `concurrency` requests in flight until `num_requests` have been sent."""
    loop = asyncio.get_running_loop()
    indices = itertools.count()

    async def client() -> None:
        while (index := next(indices)) < num_requests:
            await send(index, loop.time())

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, num_requests)):
            tasks.create_task(client())


async def _sent(send: SendRequest, index: int, due_s: float) -> None:
    await send(index, due_s)
