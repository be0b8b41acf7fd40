"""Replicas without Ray: the flags, the front over servers of this process, and joined metrics."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, cast

import pytest

from enginebay.cli.program import main
from tests.server.in_process_client import HELLO, Asker
from tests.server.raw import RawClient

CHAT = "/v1/chat/completions"
KEY = "the-key-of-a-client"
Answer = Callable[[Callable[[MutableMapping[str, Any]], Awaitable[None]]], Awaitable[None]]


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["serve", "demo", *flags]) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


def test_without_the_extra_one_line_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "enginebay_server.command.importlib.util.find_spec",
        lambda name: None if name in ("ray", "smg") else found(name),
    )
    line = refusal(capsys, "--replicas", "2")
    assert "enginebay serve --replicas needs ray, smg, not installed here" in line
    assert line.endswith("Install it: pip install 'enginebay[cluster]'")


def test_wrong_flags_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--replicas 0. Allowed: 1 or more" in refusal(capsys, "--replicas", "0")
    assert "Pass --replicas" in refusal(capsys, "--ray-address", "auto")
    assert "Pass --replicas" in refusal(capsys, "--replica-gpus", "1")
    assert "--replica-gpus -1.0" in refusal(capsys, "--replicas", "2", "--replica-gpus", "-1")
    line = refusal(capsys, "--replicas", "2", "--ray-address", "auto")
    assert "Pass --response-store" in line


def test_joined_metrics_name_their_replica_once_per_family() -> None:
    from enginebay_server.replicas.figures import join_metrics

    first = '# HELP a What.\n# TYPE a counter\na_total{x="{1 2}"} 1.0\n'
    text = first + "# HELP b Other.\n# TYPE b gauge\nb %d\n"
    assert join_metrics({0: text % 3, 2: text % 4}) == [
        "# HELP a What.",
        "# TYPE a counter",
        'a_total{replica="0",x="{1 2}"} 1.0',
        'a_total{replica="2",x="{1 2}"} 1.0',
        "# HELP b Other.",
        "# TYPE b gauge",
        'b{replica="0"} 3',
        'b{replica="2"} 4',
    ]


def test_the_beginning_of_a_prompt_is_what_the_router_gets() -> None:
    from enginebay_server.replicas.proxy import BALANCED, MAX_PLACED_CHARS, prompt_text, record_of

    fields = BALANCED[CHAT]
    one = prompt_text({"seed": 1, "messages": HELLO, "model": "demo"}, fields)
    assert prompt_text({"messages": HELLO, "model": "demo", "n": 2}, fields) == one
    assert one.startswith('"demo"')
    assert "Hello!" in one
    assert prompt_text({"model": "demo", "cache_salt": "s", "messages": HELLO}, fields) != one
    long = [{"role": "user", "content": "a" * 2 * MAX_PLACED_CHARS}]
    assert len(prompt_text({"messages": long}, fields)) == MAX_PLACED_CHARS
    for body in (b"no JSON", b"[1]", b"", b'{"messages": 7}'):
        assert isinstance(prompt_text(record_of(body, 1000), fields), str)


@contextlib.asynccontextmanager
async def listening(app: Any) -> AsyncIterator[int]:
    """The port of a server of an application in this event loop."""
    import uvicorn

    with socket.socket() as at:
        at.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_config=None, lifespan="off", interface="asgi3")
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        task = asyncio.create_task(server.serve([at]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield at.getsockname()[1]
        finally:
            server.should_exit = server.force_exit = True
            await task


@contextlib.asynccontextmanager
async def front_over(*apps: Any) -> AsyncIterator[Any]:
    """The front over servers of applications, without a router process, and its state."""
    from enginebay_server.replicas.proxy import ProxyState, proxy_app
    from enginebay_server.replicas.router import Router
    from enginebay_server.replicas.table import ReplicaTable
    from enginebay_server.settings import ServerSettings

    table = ReplicaTable(len(apps), "the-secret-of-replicas")
    state = ProxyState(ServerSettings(api_keys=(KEY,)), table, Router(table, 1), ["demo"])
    async with contextlib.AsyncExitStack() as opened:
        for replica, app in zip(table, apps, strict=True):
            replica.listens(("127.0.0.1", await opened.enter_async_context(listening(app))))
            replica.state = "ready"
        yield proxy_app(state), state
        for replica in table:
            replica.lose()


async def asked(app: Any, path: str, body: Any) -> RawClient:
    client = RawClient(app, path, body, {"authorization": f"Bearer {KEY}"})
    async with asyncio.timeout(60):
        await client.task
    return client


def replica_that(answers: Answer) -> tuple[Any, list[dict[str, str]]]:
    """An application, and the headers of the requests that it has got."""
    got: list[dict[str, str]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        got.append({name.decode(): value.decode() for name, value in scope["headers"]})
        await answers(send)

    return app, got


START = {"type": "http.response.start", "status": 200}
EVENTS = {**START, "headers": [(b"content-type", b"text/event-stream")]}


def part(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (CHAT, b'data: {"error":{"message":"replica 0 ended before its answer was complete"'),
        ("/v1/responses", b'event: error\ndata: {"type":"error","sequence_number":2,'),
        ("/v1/messages", b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"'),
    ],
)
def test_a_stream_whose_replica_ends_has_whole_events_and_an_error(
    path: str, expected: bytes
) -> None:
    async def breaks(send: Any) -> None:
        await send(EVENTS)
        await send(part(b"data: 1\n\ndata: 2\n\ndata: ha"))
        await asyncio.sleep(0.05)
        raise ConnectionError("the process ends")

    app, got = replica_that(breaks)

    async def run() -> None:
        async with front_over(app) as (front, state):
            client = await asked(front, path, {"stream": True})
            assert client.status == 200
            assert client.body.startswith(b"data: 1\n\ndata: 2\n\n" + expected)
            assert client.body.endswith(b"}\n\n")
            assert state.num_open == 0
            assert not state.forwards
            assert state.table[0].num_open == 0

    asyncio.run(run())
    assert len(got) == 1, "nothing is repeated after the first byte"
    assert got[0]["authorization"] == "Bearer the-secret-of-replicas"


def test_a_request_is_repeated_once_when_its_replica_ends_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def breaks(_: Any) -> None:
        raise ConnectionError("the process ends")

    async def answers(send: Any) -> None:
        await send({**START, "headers": [(b"content-type", b"application/json")]})
        await send(part(b"{}", more=False))

    failing, dead_got = replica_that(breaks)

    async def dead(scope: Any, receive: Any, send: Any) -> None:
        """Closes the connection without an answer, where uvicorn would answer 500."""
        with pytest.raises(ConnectionError):
            await failing(scope, receive, send)
        send.__self__.transport.abort()

    live, live_got = replica_that(answers)

    async def run(repeat_s: float) -> RawClient:
        monkeypatch.setattr("enginebay_server.replicas.proxy.REPEAT_S", repeat_s)
        async with front_over(dead, live) as (front, _):
            return await asked(front, CHAT, {})

    client = asyncio.run(run(60.0))
    assert (client.status, client.body) == (200, b"{}")
    assert (len(dead_got), len(live_got)) == (1, 1)
    client = asyncio.run(run(0.0))
    assert client.status == 503
    assert json.loads(client.body)["error"]["code"] == "replica_failed"
    assert (len(dead_got), len(live_got)) == (2, 1)


def test_the_front_over_two_applications_answers_and_ends_all(asker: Asker) -> None:
    other = Asker(asker.llm)
    for one in (asker, other):
        one.state.settings = type(one.state.settings)(api_keys=("the-secret-of-replicas",))
    body = {"messages": HELLO, "max_tokens": 5}
    expected = Asker(asker.llm).ok(CHAT, **body)["choices"]

    async def run() -> None:
        async with front_over(asker.app, other.app) as (front, state):
            clients = await asyncio.gather(*(asked(front, CHAT, body) for _ in range(4)))
            for client in clients:
                assert json.loads(client.body)["choices"] == expected
            long = {**body, "max_tokens": 200, "ignore_eos": True, "stream": True}
            stream = RawClient(front, CHAT, long, {"authorization": f"Bearer {KEY}"})
            await stream.has_body.wait()
            await state.end_all()
            await stream.task
            assert b'"code":"engine_stopped"' in stream.body.split(b"data: ")[-1]
            keyless = RawClient(front, CHAT, body)
            await keyless.task
            assert keyless.status == 401

    asyncio.run(run())
    counts = [one.state.metrics.of["demo"].num_ended["length"] for one in (asker, other)]
    assert counts == [2, 2]


def test_stored_responses_of_two_stores_on_one_file_are_shared(tmp_path: Path) -> None:
    from enginebay_server.response_store import StoredResponse, open_store
    from enginebay_server.settings import ServerSettings

    for journal in ("WAL", "TRUNCATE"):
        path = str(tmp_path / f"{journal}.sqlite")
        settings = ServerSettings(response_store=path, response_journal=journal)  # type: ignore[arg-type]
        one, other = open_store(settings), open_store(settings)
        one.put("a", StoredResponse({"id": "a"}, [], []))
        found = other.get("a")
        assert found is not None
        assert found.record == {"id": "a"}
        assert other.delete("a")
        assert one.get("a") is None
        one.close()
        other.close()


class HangingActors:
    """Actors of one replica that is lost at once, and whose next process never listens."""

    def __init__(self) -> None:
        self.is_asked_again, self.is_closed = threading.Event(), threading.Event()
        self.addresses = [("127.0.0.1", 1)]

    def address(self, number: int) -> tuple[str, int]:
        if self.addresses:
            return self.addresses.pop()
        self.is_asked_again.set()
        self.is_closed.wait(60)
        raise ConnectionError

    def close(self) -> None:
        self.is_closed.set()


def test_replicas_are_ended_before_the_threads_that_wait_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of an event loop waits for its threads, for up to five minutes."""
    from enginebay_server.replicas import serve
    from enginebay_server.replicas.proxy import ProxyState
    from enginebay_server.replicas.table import ReplicaTable
    from enginebay_server.settings import ServerSettings

    async def until_hanging(*_: object) -> int:
        while not actors.is_asked_again.is_set():
            await asyncio.sleep(0.01)
        return signal.SIGTERM

    class NoRouter:
        async def run(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(serve, "run_until_drained", until_hanging)
    actors, table, unused = HangingActors(), ReplicaTable(1, "secret"), cast("Any", None)
    state = ProxyState(ServerSettings(), table, cast("Any", NoRouter()), ["demo"])
    with asyncio.Runner() as runner:
        run = serve.run_proxy(unused, unused, state, cast("Any", actors), "here")
        assert runner.run(run) == signal.SIGTERM
        was_closed = actors.is_closed.is_set()
        actors.close()
    assert was_closed


def test_the_front_counts_a_large_body_first_and_reads_it_on_its_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A body of lists takes 0.35 s to read, and everybody would wait as long."""
    from enginebay_server.replicas import proxy

    threads, read = [], proxy.record_of

    def noted(body: bytes, max_values: int) -> dict[str, Any]:
        threads.append(threading.current_thread().name)
        return read(body, max_values)

    async def answers(send: Any) -> None:
        await send({**START, "headers": [(b"content-type", b"application/json")]})
        await send(part(b"{}", more=False))

    async def run() -> None:
        async with front_over(app) as (front, _):
            assert (await asked(front, CHAT, {"user": "a" * (1 << 17)})).status == 200
            client = await asked(front, CHAT, b'{"messages": [' + b"[]," * (1 << 20) + b"0]}")
            assert client.status == 400
            assert json.loads(client.body)["error"]["code"] == "request_too_large"

    monkeypatch.setattr(proxy, "record_of", noted)
    app, got = replica_that(answers)
    asyncio.run(run())
    assert len(got) == 1
    assert threads == ["enginebay-large-0"] * 2
