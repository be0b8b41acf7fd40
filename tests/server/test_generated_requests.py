"""Thousands of generated requests over every operation of the server's document: no answer is a
fault of the server, the log has one whole line for each, and the server answers as before.
"""

from __future__ import annotations

import collections
import concurrent.futures
import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.generated_requests import GeneratedRequest, generated_requests
from tests.server.hostile_bodies import ADAPTER_BASES, BASES
from tests.server.process import FEW_SIZES, ServerProcess

NUM_REQUESTS = 5000
SEED = 36
NUM_CLIENTS = 6
LIMIT_S = 120
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [\w.]+ (DEBUG|INFO|WARNING|ERROR) \S.*")
REQUEST_LINE = re.compile(r"id=(\S+) method=\S+ path=(\S*) status=(\d+) seconds=\d+\.\d{4}")
NO_HTTP = "Invalid HTTP request received."
CHAT = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8, "temperature": 0}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose answers are short, also those without max_tokens."""
    store = tmp_path_factory.mktemp("store") / "responses.sqlite"
    flags = ("--max-model-len", "64", "--log-level", "info", "--set", "embeddings=true")
    stored = ("--response-store", str(store), "--tool-parser", "hermes")
    adapters = ("--lora-routes", "--max-loras", "1")
    with ServerProcess(*flags, *stored, *adapters, command=FEW_SIZES) as running:
        running.wait_for("ready")
        yield running


def ask(server: ServerProcess, request: GeneratedRequest) -> tuple[int, str, str]:
    """Status, x-request-id and text of an answer."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=LIMIT_S)
    try:
        connection.putrequest(request.method, request.target)
        for name, value in request.headers:
            connection.putheader(name, value)
        connection.putheader("content-length", str(len(request.body)))
        connection.endheaders(request.body)
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
        return answer.status, answer.getheader("x-request-id", ""), text
    finally:
        connection.close()


def is_no_http(answer: tuple[int, str, str]) -> bool:
    """Whether an answer was given to what is no HTTP: an unknown method, or a byte that no header
    may have. Such a request has no id. The answer to a HEAD has no text.
    """
    status, request_id, text = answer
    return (status, request_id) == (400, "") and (not text or NO_HTTP in text)


def chat(server: ServerProcess) -> str:
    body = json.dumps(CHAT).encode()
    kind = (("content-type", "application/json"),)
    status, _, text = ask(server, GeneratedRequest("POST", "/v1/chat/completions", kind, body))
    assert status == 200, text
    content: str = json.loads(text)["choices"][0]["message"]["content"]
    return content


def test_generated_requests_find_no_fault_of_the_server(server: ServerProcess) -> None:
    *_, text = ask(server, GeneratedRequest("GET", "/openapi.json", (), b""))
    requests = list(generated_requests(json.loads(text), NUM_REQUESTS, SEED))
    assert len({(one.method, one.target.partition("?")[0]) for one in requests}) > 30
    assert {*BASES, *ADAPTER_BASES} < {one.target.partition("?")[0] for one in requests}
    before = chat(server)
    first = len(server.errors)
    with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as pool:
        answers = list(pool.map(lambda one: ask(server, one), requests))
    assert chat(server) == before

    faults = [
        (status, text[:300], request)
        for (status, _, text), request in zip(answers, requests, strict=True)
        if status >= 500 or '"server_error"' in text or '"api_error"' in text
    ]
    counts = collections.Counter(status for status, *_ in answers)
    assert not faults, (len(faults), faults[:5])
    assert counts[200] > NUM_REQUESTS // 10, counts
    assert counts[400] > NUM_REQUESTS // 10, counts

    lines = [line.rstrip("\n") for line in server.errors[first:]]
    broken = [line for line in lines if not LINE.fullmatch(line) or not line.isprintable()]
    assert not broken, (len(broken), broken[:5])
    logged = {found[1] for line in lines if (found := REQUEST_LINE.search(line))}
    unlogged = [
        (answer, request)
        for answer, request in zip(answers, requests, strict=True)
        if answer[1] not in logged and not is_no_http(answer)
    ]
    assert not unlogged, (len(unlogged), unlogged[:5])
    most_kib = int(re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{server.pid}/status").read_text())[0])
    assert most_kib < 2 * 2**20
