"""Many clients at once over a real server: streams that are left, impatient clients, and signals.

The long runs are slow tests, which `make test-load` runs; `make test-serve` runs short ones.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.process import COMMAND, END_S, FEW_SIZES, ServerProcess, is_running
from tests.server.wire import Answer, ask, connected

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NAMES = ["Tom", "Sue", "Pip", "Ann", "The cat", "A dog", "The fox", "Max"]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    *(
        (COMPLETIONS, {"prompt": f"{name} saw", "max_tokens": 40, "temperature": 1.0, "seed": i})
        for i, name in enumerate(NAMES)
    ),
    *(
        (CHAT, {"messages": [{"role": "user", "content": name}], "max_tokens": 24, "n": n})
        for name, n in (("Hello!", 1), ("Tell a story.", 2))
    ),
]
LIVE = ("--max-num-seqs", "16")
ROUNDS = 6
MAX_GROWTH_MIB = 16
"""How much more resident memory a server may have in the second half of a load."""
WAIT_S = 60
LONG: dict[str, Any] = {"prompt": "One day", "max_tokens": 200, "ignore_eos": True}
TOLD = {"engine_stopped", "server_draining", "request_aborted"}
"""Codes of errors that say that the server ends."""


def texts_of(answer: Answer) -> list[str]:
    """The text of each choice of an answer, whole or streamed, also if a part of it is missing."""
    found: dict[int, str] = collections.defaultdict(str)
    is_stream = answer.headers["content-type"].startswith("text/event-stream")
    for record in answer.records if is_stream else [json.loads(answer.body)]:
        for choice in record["choices"]:
            text = choice.get("text")
            if text is None:
                text = choice["delta" if is_stream else "message"].get("content")
            found[choice["index"]] += text or ""
    return [found[index] for index in sorted(found)]


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def figures_of(text: str, name: str) -> dict[str, float]:
    """The samples of a metric by their labels."""
    lines = re.findall(rf"^enginebay:{name}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
    assert lines, f"no metric {name}"
    return {labels: float(value) for labels, value in lines}


class Load:
    """Clients of a server, each of which sends one request after the other."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.alone: list[list[str]] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.end_s = 0.0

    async def run_alone(self) -> None:
        """Keep the texts of each request that runs by itself."""
        for path, body in REQUESTS:
            self.alone.append(texts_of(await ask(self.url, path, body)))

    async def client(self, seed: int) -> None:
        """Send requests until the end; about a third of them are left at a random time."""
        draw = random.Random(seed)
        while time.monotonic() < self.end_s:
            place = draw.randrange(len(REQUESTS))
            path, body = REQUESTS[place]
            streams = draw.random() < 0.9
            leaves = draw.randrange(0, 8) if draw.random() < 0.35 else None
            answer = Answer()
            async with connected(self.url) as connection:
                connection.send(path, {**body, "stream": streams})
                if leaves is None:
                    answer = await connection.answer()
                elif streams and leaves:
                    async for _ in connection.parts(answer):
                        leaves -= 1
                        if not leaves:
                            break
                else:
                    await asyncio.sleep(draw.random() / 4)
                if leaves is not None and draw.random() < 0.5:
                    connection.writer.transport.abort()
            self.judge(place, answer, is_left=leaves is not None)

    def judge(self, place: int, answer: Answer, *, is_left: bool) -> None:
        """A whole answer is what its request gives alone, and a part of it is a beginning."""
        if answer.status is None:
            assert is_left, "the server closed a connection without an answer"
            self.counts["left before"] += 1
            return
        assert answer.status == 200, answer.body
        alone, texts = self.alone[place], texts_of(answer)
        if answer.is_whole:
            assert texts == alone
            self.counts["whole"] += 1
        else:
            assert is_left, "a stream ended too soon"
            assert all(one.startswith(text) for one, text in zip(alone, texts, strict=False))
            self.counts["left within"] += 1


async def nothing_left(url: str) -> None:
    """Wait until no request runs; then no page is held."""
    async with asyncio.timeout(WAIT_S):
        while True:
            text = (await ask(url, "/metrics")).body.decode()
            open_ = [figures_of(text, f"num_requests_{name}") for name in ("running", "waiting")]
            open_.append(figures_of(text, "http_requests_queued"))
            if not any(value for figures in open_ for value in figures.values()):
                break
            await asyncio.sleep(0.1)
    pages = figures_of(text, "kv_cache_group_pages")
    states = {re.search(r'state="(\w+)"', labels)[1]: value for labels, value in pages.items()}  # type: ignore[index]
    assert states["held"] == states["shared"] == 0, states
    assert states["free"] > 0
    assert set(figures_of(text, "kv_cache_usage_perc").values()) == {0.0}


@dataclasses.dataclass(frozen=True)
class Size:
    """How large the tests of one server are."""

    command: Sequence[str]
    num_clients: int
    seconds: float
    num_leaving: int
    answer_s: float


SHORT = Size(FEW_SIZES, 32, 3, 64, WAIT_S)
LONG_RUN = Size(COMMAND, 200, 180, 200, 5)


@pytest.fixture(
    scope="module",
    params=[SHORT, pytest.param(LONG_RUN, marks=pytest.mark.slow)],
    ids=["short", "long"],
)
def size(request: pytest.FixtureRequest) -> Size:
    found: Size = request.param
    return found


@pytest.fixture(scope="module")
def server(size: Size) -> Iterator[ServerProcess]:
    """A server whose programs are all compiled."""
    with ServerProcess(*LIVE, command=size.command) as made:
        made.wait_for("ready")
        yield made


def test_no_token_is_lost_or_mixed_and_nothing_is_left(server: ServerProcess, size: Size) -> None:
    num_clients = size.num_clients
    resident: list[float] = []

    async def run() -> Load:
        load = Load(server.url)
        await load.run_alone()
        for number in range(ROUNDS):
            load.end_s = time.monotonic() + size.seconds / ROUNDS
            clients = [load.client(number * num_clients + one) for one in range(num_clients)]
            await asyncio.gather(*clients)
            await nothing_left(server.url)
            resident.append(resident_mib(server.pid))
        return load

    load = asyncio.run(run())
    print(dict(load.counts), "resident MiB:", [round(one, 1) for one in resident])
    assert all(load.counts[kind] >= num_clients for kind in ("whole", "left within"))
    assert max(resident) - max(resident[: ROUNDS // 2]) < MAX_GROWTH_MIB, resident


def test_a_request_is_answered_after_many_clients_gave_up(
    server: ServerProcess, size: Size
) -> None:
    """Every client leaves 0.5 s after its request."""

    async def give_up(number: int) -> bool:
        body = {**LONG, "seed": number, "temperature": 1.0, "stream": number % 2 == 0}
        async with connected(server.url) as connection:
            connection.send(COMPLETIONS, body)
            try:
                async with asyncio.timeout(0.5):
                    return (await connection.answer()).is_whole
            except TimeoutError:
                return False

    async def run() -> None:
        are_whole = await asyncio.gather(*map(give_up, range(size.num_leaving)))
        async with asyncio.timeout(size.answer_s):
            answer = await ask(server.url, COMPLETIONS, {"prompt": "One day", "max_tokens": 5})
        assert answer.status == 200
        assert sum(are_whole) < size.num_leaving / 2, "the clients left too late to show anything"
        await nothing_left(server.url)

    asyncio.run(run())


def is_told(answer: Answer) -> bool:
    """Whether an answer is complete, or ends with an error that says that the server ends."""
    if answer.status == 503:
        return json.loads(answer.body)["error"]["code"] in TOLD
    assert answer.status == 200, answer.body
    assert answer.is_whole
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return bool(json.loads(answer.body)["choices"][0]["finish_reason"])
    if answer.events[-1] == "[DONE]":
        return True
    return answer.records[-1]["error"]["code"] in TOLD


@pytest.mark.parametrize(
    ("num_clients", "drain_s"), [(48, 0.3), pytest.param(200, 4, marks=pytest.mark.slow)]
)
def test_every_accepted_request_is_answered_or_told_after_a_signal(
    num_clients: int, drain_s: float
) -> None:
    flags = ("--drain-timeout", str(drain_s), "--max-concurrency", str(num_clients // 2))

    async def one(server: ServerProcess, number: int) -> Answer:
        tokens = 20 if number % 8 == 0 else 200
        body = {**LONG, "max_tokens": tokens, "seed": number, "stream": number % 3 > 0}
        return await ask(server.url, COMPLETIONS, body)

    async def run(server: ServerProcess) -> list[Answer]:
        guided = {"prompt": "One", "guided_choice": ["a"]}  # a guide runs in a process of its own
        assert (await ask(server.url, COMPLETIONS, guided)).status == 200
        clients = [asyncio.create_task(one(server, number)) for number in range(num_clients)]
        async with asyncio.timeout(WAIT_S):
            while not await is_busy(server.url):
                await asyncio.sleep(0.01)
        children = server.children
        assert children
        began_s = time.monotonic()
        server.terminate()
        async with asyncio.timeout(WAIT_S):
            answers = await asyncio.gather(*clients)
            assert await asyncio.to_thread(server.exit_code) == 0
        assert time.monotonic() - began_s < drain_s + END_S
        assert not [pid for pid in children if is_running(pid)]
        return answers

    with ServerProcess(*LIVE, *flags, command=FEW_SIZES) as server:
        server.wait_for("ready")
        answers = asyncio.run(run(server))
    assert all(map(is_told, answers))
    errors = [answer for answer in answers if b'"error"' in answer.body]
    print(len(errors), "of", num_clients, "requests ended with an error")
    assert errors, "the signal came too late"
    assert len(errors) < num_clients, "the signal came too soon"


async def is_busy(url: str) -> bool:
    """Whether requests run, and others wait for a place."""
    text = (await ask(url, "/metrics")).body.decode()
    names = ("num_requests_running", "http_requests_queued")
    return all(sum(figures_of(text, name).values()) for name in names)


def test_a_killed_server_starts_again_on_its_port_with_its_responses(tmp_path: Path) -> None:
    store = tmp_path / "responses"
    lazy = (*LIVE, "--warmup", "lazy", "--response-store", str(store))

    async def respond(url: str, kept: dict[str, str]) -> None:
        """Ask for one response after the other until the server is gone."""
        while True:
            body = {"input": f"Tell a story. {len(kept)}", "max_output_tokens": 4}
            try:
                answer = await ask(url, "/v1/responses", body)
            except ConnectionError:
                return
            if not answer.is_whole:
                return
            record = json.loads(answer.body)
            kept[record["id"]] = record["output"][0]["content"][0]["text"]

    async def run(server: ServerProcess) -> dict[str, str]:
        kept: dict[str, str] = {}
        guided = {"prompt": "One", "guided_choice": ["a"]}
        assert (await ask(server.url, COMPLETIONS, guided)).status == 200
        tasks = [asyncio.create_task(respond(server.url, kept)) for _ in range(8)]
        async with asyncio.timeout(WAIT_S):
            while len(kept) < 30:
                await asyncio.sleep(0.01)
            server.send(signal.SIGKILL)
            await asyncio.gather(*tasks)
        return kept

    with ServerProcess(*lazy, command=FEW_SIZES) as server:
        kept = asyncio.run(run(server))
        port = urlsplit(server.url).port
        children = server.children
        assert server.exit_code() == -signal.SIGKILL
    with ServerProcess(*lazy, "--port", str(port), command=FEW_SIZES) as again:
        assert urlsplit(again.url).port == port
        for name, text in kept.items():
            found = asyncio.run(ask(again.url, f"/v1/responses/{name}"))
            assert found.status == 200, name
            assert json.loads(found.body)["output"][0]["content"][0]["text"] == text
        more = {"input": "Again", "max_output_tokens": 2, "previous_response_id": next(iter(kept))}
        assert asyncio.run(ask(again.url, "/v1/responses", more)).status == 200
        until_s = time.monotonic() + WAIT_S
        while any(map(is_running, children)) and time.monotonic() < until_s:
            time.sleep(0.05)
        assert not [pid for pid in children if is_running(pid)], "children outlive their parent"
    with contextlib.closing(sqlite3.connect(store)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.slow
def test_a_lazy_server_answers_within_five_seconds_of_its_start() -> None:
    """The native kernels of the machine were compiled by a start before."""

    def seconds() -> float:
        """The server's CPU seconds: those of the wall clock depend on what else runs."""
        with ServerProcess("--warmup", "lazy") as server:
            body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
            assert asyncio.run(ask(server.url, CHAT, body)).status == 200
            times = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")

    took = [seconds() for _ in range(3)]
    print("CPU seconds until the first chat was answered:", took)
    assert min(took[1:]) < 5
