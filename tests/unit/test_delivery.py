"""Events of requests are handed to their readers by a thread of its own, each of them once."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Iterator

import pytest

from enginebay.serving.loop import EngineLoop
from enginebay.serving.running import TokenEvent
from tests.fakes import expected_tokens
from tests.pool import EnginePool
from tests.unit.loops import OPTIONS, Loops, composed, request, running
from tests.unit.serving import DEADLOCK_S


@pytest.fixture
def start(engine_pool: EnginePool) -> Iterator[Loops]:
    """Starts loops, ends them, and looks at the books."""
    with composed(engine_pool, "fake", "oengine", **OPTIONS["oengine"]) as made:
        yield from running(made)


def test_readers_are_handed_every_event_of_a_batch(start: Loops) -> None:
    """The delivery thread is held until several requests have events that are due together."""
    loop: EngineLoop = start()
    begun, go = threading.Event(), threading.Event()
    taken: queue.SimpleQueue[tuple[str, TokenEvent]] = queue.SimpleQueue()

    def take(name: str, event: TokenEvent) -> None:
        begun.set()
        assert go.wait(DEADLOCK_S)
        taken.put((name, event))

    requests = [request(f"reader {i}", max_tokens=12) for i in range(3)]
    takes = [functools.partial(take, one.request_id) for one in requests]
    loop.submit(requests, takes)
    assert begun.wait(DEADLOCK_S)
    loop.call(lambda: None)
    go.set()
    got: dict[str, list[int]] = {one.request_id: [] for one in requests}
    unfinished = set(got)
    while unfinished:
        name, event = taken.get(timeout=DEADLOCK_S)
        got[name] += event.token_ids
        unfinished -= {name} if event.finish_reason else set()
    assert got == {one.request_id: expected_tokens(one) for one in requests}
