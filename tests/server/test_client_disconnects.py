"""Clients that leave, requests beyond the limits, and requests that take too long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.in_process_client import HELLO, Asker, error_of, events_of, set_paused
from tests.server.raw import RawClient

CHAT = "/v1/chat/completions"
LONG: dict[str, Any] = {"messages": HELLO, "max_tokens": 200, "ignore_eos": True}
WAIT_S = 60


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():
            await asyncio.sleep(0.005)


def num_open(asker: Asker) -> int:
    counts = asker.llm.counts()
    return counts.waiting + counts.running


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(asker: Asker, stream: bool) -> None:
    async def run() -> None:
        client = RawClient(asker.app, CHAT, {**LONG, "n": 3, "stream": stream})
        if stream:
            await client.has_body.wait()
        await until(lambda: num_open(asker) == 1)
        client.leave()
        async with asyncio.timeout(WAIT_S):
            await client.task
        await until(lambda: num_open(asker) == 0)
        assert b"[DONE]" not in client.body

    asyncio.run(run())
    assert asker.state.num_open == 0
    assert asker.state.metrics.of["demo"].num_ended["abort"] >= 3
    asker.ok(CHAT, messages=HELLO, max_tokens=1)


def test_a_client_that_leaves_before_its_turn_takes_no_place(asker: Asker, held: None) -> None:
    small = Asker(asker.llm, max_concurrency=1)

    async def run() -> None:
        first = RawClient(small.app, CHAT, LONG)
        await until(lambda: num_open(asker) == 1)
        second, third = (RawClient(small.app, CHAT, LONG) for _ in range(2))
        await until(lambda: small.state.limit.num_waiting == 2)
        second.leave()
        await until(lambda: small.state.limit.num_waiting == 1)
        assert second.status == 499
        first.leave()
        await until(lambda: small.state.limit.num_waiting == 0 and num_open(asker) == 1)
        third.leave()
        await asyncio.gather(first.task, second.task, third.task)
        await until(lambda: num_open(asker) == 0)

    asyncio.run(run())
    assert small.state.num_open == 0


def test_requests_beyond_the_queue_are_refused_until_there_is_room(
    asker: Asker, held: None
) -> None:
    small = Asker(asker.llm, max_concurrency=1, max_queue=1, retry_after_s=7)

    async def run() -> None:
        clients = [RawClient(small.app, CHAT, {**LONG, "max_tokens": 2}) for _ in range(3)]
        await until(lambda: sum(client.status is not None for client in clients) == 1)
        [refused] = [client for client in clients if client.status is not None]
        assert refused.status == 429
        assert b"rate_limit_exceeded" in refused.body
        set_paused(asker.llm.loop, paused=False)
        await asyncio.gather(*(client.task for client in clients))
        assert sorted(client.status or 0 for client in clients) == [200, 200, 429]

    asyncio.run(run())
    refusing = Asker(asker.llm, max_concurrency=1, max_queue=0, retry_after_s=7)
    refusing.state.limit._places._value = 0
    answer = refusing.post(CHAT, LONG)
    assert error_of(answer, 429)["type"] == "rate_limit_error"
    assert answer.headers["retry-after"] == "7"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_is_ended(asker: Asker, held: None, stream: bool) -> None:
    import json

    hasty = Asker(asker.llm, request_timeout_s=0.2)
    answer = hasty.post(CHAT, {**LONG, "stream": stream})
    if stream:
        assert answer.status_code == 200
        error = json.loads(events_of(answer.text)[-1])["error"]
    else:
        error = error_of(answer, 504)
    assert error["type"] == "timeout_error"
    assert num_open(asker) == 0


def test_a_client_that_reads_nothing_holds_nothing_after_its_time(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enginebay_server.sse.FINAL_EVENT_TIMEOUT_S", 0.05)
    hasty = Asker(asker.llm, request_timeout_s=0.3)

    async def run() -> None:
        client = RawClient(hasty.app, CHAT, {**LONG, "stream": True})
        client.reads.clear()
        async with asyncio.timeout(WAIT_S):
            await client.task

    asyncio.run(run())
    assert num_open(asker) == 0
    assert hasty.state.limit._places._value == hasty.state.settings.max_concurrency


def test_a_fault_of_ours_in_a_stream_is_its_last_event(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    import json

    from enginebay_server.chat import ChatStream

    def fails(*_: object) -> bytes:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(ChatStream, "write", fails)
    answer = asker.post(CHAT, {**LONG, "stream": True})
    error = json.loads(events_of(answer.text)[-1])["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")


def test_many_streams_that_leave_keep_nothing(asker: Asker) -> None:
    asker.ok("/tokenize", prompt="a")  # starts the threads on which prompts are prepared
    before = threading.active_count()

    async def run() -> None:
        clients = [
            RawClient(asker.app, CHAT, {**LONG, "stream": True, "seed": i, "temperature": 1.0})
            for i in range(24)
        ]
        await clients[0].has_body.wait()
        for client in clients:
            client.leave()
            await asyncio.sleep(0.01)
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(client.task for client in clients))
        await until(lambda: num_open(asker) == 0)

    asyncio.run(run())
    assert asker.state.limit._places._value == asker.state.settings.max_concurrency
    assert threading.active_count() <= before + 1


def test_streams_that_run_together_have_the_texts_that_they_have_alone(asker: Asker) -> None:
    bodies = [
        {"prompt": f"{name} saw", "max_tokens": 20, "temperature": 1.0, "seed": i}
        for i, name in enumerate(["Tom", "Sue", "Pip", "Ann", "The cat", "A dog"])
    ]
    path = "/v1/completions"
    alone = [asker.ok(path, **body)["choices"][0]["text"] for body in bodies]
    requests = [("POST", path, {"json": {**body, "stream": True}}) for body in bodies]
    import json

    for answer, expected in zip(asker.all(*requests), alone, strict=True):
        events = [json.loads(event) for event in events_of(answer.text)[:-1]]
        assert "".join(event["choices"][0]["text"] for event in events) == expected
