"""Bodies of the largest size over every path and field, from eight clients at a time: the server
stays awake, and its memory is bounded.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.hostile_bodies import ADAPTER_BASES, BASES, HELLO, hostile_bodies
from tests.server.process import ServerProcess

NUM_CLIENTS = 8
MAX_BODY_BYTES = 8 * 2**20
ALIVE_S, FIRST_TOKEN_S = 0.25, 0.5
MAX_GIGABYTES = 2.0
CHAT = json.dumps({"messages": HELLO, "max_tokens": 1}).encode()

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--lora-routes", "--max-loras", "1") as running:
        running.wait_for("ready")
        yield running


def ask(
    server: ServerProcess, method: str, path: str, body: bytes | None = None
) -> tuple[int, float]:
    """Status and seconds of one request."""
    began_s = time.monotonic()
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=120)
    connection.request(method, path, body, {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status, time.monotonic() - began_s


def test_hostile_bodies_hold_up_nobody(server: ServerProcess) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=120)
    connection.request("GET", "/openapi.json")
    document = json.loads(connection.getresponse().read())
    connection.close()
    quiet_s = min(ask(server, "POST", "/v1/chat/completions", CHAT)[1] for _ in range(5))
    late = []
    bases = {**BASES, **ADAPTER_BASES}
    for path, what, body in hostile_bodies(document, MAX_BODY_BYTES, bases):
        statuses: list[int] = []

        def send(path: str = path, body: bytes = body, statuses: list[int] = statuses) -> None:
            statuses.append(ask(server, "POST", path, body)[0])

        clients = [threading.Thread(target=send) for _ in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        alive_s = chat_s = 0.0
        while any(client.is_alive() for client in clients) or not chat_s:
            alive_s = max(alive_s, ask(server, "GET", "/liveness")[1])
            chat_s = max(chat_s, ask(server, "POST", "/v1/chat/completions", CHAT)[1])
        for client in clients:
            client.join()
        allowed = {200, 400, 413, 422} | ({404} if path in ADAPTER_BASES else set())
        assert set(statuses) <= allowed, (path, what, statuses)
        if alive_s > ALIVE_S or chat_s > quiet_s + FIRST_TOKEN_S:
            load = f"load average {os.getloadavg()[0]:.1f}"
            late.append(f"{path}, {what}: alive {alive_s:.2f} s, chat {chat_s:.2f} s, {load}")
    most_kib = int(re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{server.pid}/status").read_text())[0])
    assert not late, late
    assert most_kib / 2**20 < MAX_GIGABYTES
    assert not any("Traceback" in line for line in server.errors)
