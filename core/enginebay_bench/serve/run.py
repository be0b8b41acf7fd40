"""Runs loads on a server one after the other: warm-up, then each measurement, with the client's own
cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import math
import time
from collections.abc import Coroutine, Iterator, Sequence
from typing import Protocol, Self

from enginebay_bench.serve.arrivals import closed_loop, open_loop, poisson_offsets
from enginebay_bench.serve.bounds import Bounds
from enginebay_bench.serve.figures import ClientCost, ServeFigures, make_figures
from enginebay_bench.serve.prompts import PromptSource, PromptSpec
from enginebay_bench.serve.target import ServerTarget
from enginebay_bench.serve.timeline import RequestTimeline

TICK_S = 0.02


class Sender(Protocol):
    """What sends a request; `client.Client` is the one that speaks HTTP."""

    async def send(self, body: bytes, timeline: RequestTimeline) -> None:
        """Send a body and fill its timeline until the answer ends; failures are in the timeline."""

    async def aclose(self) -> None:
        """Close all connections."""


@dataclasses.dataclass(frozen=True)
class Load:
    """One measurement: a rate of arrivals per second (open loop) or a number of requests in flight
    (closed loop), and how many requests.
    """

    num_requests: int
    rate: float | None = None
    concurrency: int | None = None


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A load's figures, and the timelines of the requests that ended."""

    figures: ServeFigures
    timelines: Sequence[RequestTimeline]


class LoadRunner:
    """Measures loads on one server. A context manager: it owns an event loop and connections."""

    def __init__(
        self,
        target: ServerTarget,
        prompts: PromptSource,
        sender: Sender,
        bounds: Bounds | None = None,
        seed: int = 0,
    ) -> None:
        self._target, self._prompts, self._sender = target, prompts, sender
        self._bounds, self._seed = bounds, seed
        self._runner = asyncio.Runner()
        self._num_takes = 0
        self.measured: list[Measurement] = []
        """All measurements so far; the last one is a part if Ctrl-C ended it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            self._runner.run(self._sender.aclose())
        self._runner.close()

    def warm_up(self, num_requests: int, concurrency: int) -> str | None:
        """Send requests that no figure counts, `concurrency` at a time; return the first error."""
        timelines = self._timelines(num_requests)
        bodies = self._bodies(num_requests)
        self._runner.run(closed_loop(self._send(bodies, timelines), num_requests, concurrency))
        return next((one.error for one in timelines if one.error is not None), None)

    def measure(self, load: Load) -> Measurement:
        """Run one load until all of its answers have ended."""
        timelines = self._timelines(load.num_requests)
        send = self._send(self._bodies(load.num_requests), timelines)
        if load.rate is not None:
            run = open_loop(send, poisson_offsets(load.num_requests, load.rate, self._seed))
        else:
            assert load.concurrency is not None, "a load has a rate or a concurrency"
            run = closed_loop(send, load.num_requests, load.concurrency)
        delays_s: list[float] = []
        start_s = time.process_time()
        try:
            with _no_collection():
                self._runner.run(_with_ticks(run, delays_s))
        finally:
            ended = [one for one in timelines if not math.isnan(one.ended_s)]
            if ended:
                figures = make_figures(
                    ended,
                    ClientCost(time.process_time() - start_s, delays_s),
                    rate=load.rate,
                    concurrency=load.concurrency,
                    bounds=self._bounds,
                )
                self.measured.append(Measurement(figures, ended))
        return self.measured[-1]

    def _timelines(self, num_requests: int) -> list[RequestTimeline]:
        return [RequestTimeline(index, math.nan) for index in range(num_requests)]

    def _bodies(self, num_requests: int) -> list[bytes]:
        """Bodies of requests that no earlier measurement has sent, unless a file is too short."""
        specs: list[PromptSpec] = self._prompts.take(num_requests, self._num_takes)
        self._num_takes += 1
        return [self._target.body(spec) for spec in specs]

    def _send(
        self, bodies: Sequence[bytes], timelines: Sequence[RequestTimeline]
    ) -> _IndexedSender:
        return _IndexedSender(self._sender, bodies, timelines)


@dataclasses.dataclass(frozen=True)
class _IndexedSender:
    """Sends the request of an index; what `arrivals` calls."""

    sender: Sender
    bodies: Sequence[bytes]
    timelines: Sequence[RequestTimeline]

    async def __call__(self, index: int, due_s: float) -> None:
        timeline = self.timelines[index]
        timeline.due_s = due_s
        await self.sender.send(self.bodies[index], timeline)


async def _with_ticks(run: Coroutine[None, None, None], delays_s: list[float]) -> None:
    """Run a load, and note how late the event loop is."""
    loop = asyncio.get_running_loop()

    async def tick() -> None:
        while True:
            due_s = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            delays_s.append(loop.time() - due_s)

    ticks = loop.create_task(tick())
    try:
        await run
    finally:
        ticks.cancel()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Python's garbage collector does not stop the clock of the requests."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
