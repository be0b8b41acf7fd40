"""Connections as uvicorn keeps them: how long, over TLS, and what counts as a client that left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from enginebay_server import heads
from enginebay_server.heads import MAX_HEAD_BYTES
from enginebay_server.serving import Address, run_until_drained
from tests.server.in_process_client import Asker
from tests.server.wire import Answer, ask, connected

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "One day", "max_tokens": 1}
LONG: dict[str, Any] = {"prompt": "One day", "max_tokens": 200, "ignore_eos": True}
WAIT_S = 60


@contextlib.contextmanager
def listening(asker: Asker, **address: Any) -> Iterator[str]:
    """The URL at which a thread serves the application of `asker`."""
    at = Address(port=0, **address)
    server = uvicorn.Server(at.config(asker.app))
    with at.open() as opened:

        def run() -> None:
            with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
                runner.run(run_until_drained(server, opened, asker.state, "listening"))

        thread = threading.Thread(target=run)
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield at.url(opened)
        finally:
            server.should_exit = True
            thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_connection_is_kept_for_its_time_and_then_closed(asker: Asker) -> None:
    async def run(url: str) -> None:
        async with connected(url) as connection, asyncio.timeout(WAIT_S):
            for _ in range(3):
                connection.send(COMPLETIONS, BODY)
                answer = await connection.answer()
                assert (answer.status, answer.is_whole) == (200, True)
            assert await connection.reader.read() == b"", "the server closes it after a second"

    with listening(asker, keep_alive_s=1) as url:
        asyncio.run(run(url))


def test_without_keep_alive_each_connection_has_one_answer(asker: Asker) -> None:
    async def run(url: str) -> None:
        async with connected(url) as connection, asyncio.timeout(WAIT_S):
            connection.send(COMPLETIONS, BODY)
            assert (await connection.answer()).status == 200
            assert await connection.reader.read() == b""

    with listening(asker, keep_alive_s=0) as url:
        asyncio.run(run(url))


def test_a_client_that_closes_its_sending_side_has_left(asker: Asker) -> None:
    async def run(url: str) -> None:
        async with connected(url) as connection, asyncio.timeout(WAIT_S):
            connection.send(COMPLETIONS, LONG)
            while not asker.llm.counts().running:
                await asyncio.sleep(0.005)
            connection.writer.write_eof()
            assert not (await connection.answer()).is_whole
            while asker.llm.counts().running or asker.state.num_open:
                await asyncio.sleep(0.005)

    with listening(asker) as url:
        asyncio.run(run(url))
    assert asker.state.metrics.of["demo"].num_ended["abort"] == 1


def test_a_body_that_stops_in_the_middle_is_refused_and_its_connection_closed(
    asker: Asker,
) -> None:
    hasty = Asker(asker.llm, body_timeout_s=0.3)

    async def run(url: str) -> Answer:
        async with connected(url) as connection, asyncio.timeout(WAIT_S):
            head = "POST /v1/completions HTTP/1.1\r\nhost: server\r\ncontent-length: 100"
            connection.writer.write(f'{head}\r\n\r\n{{"prompt"'.encode())
            answer = await connection.answer()
            assert await connection.reader.read() == b""
            return answer

    with listening(hasty) as url:
        answer = asyncio.run(run(url))
    assert answer.status == 408
    assert answer.headers["connection"] == "close"
    assert hasty.state.num_open == 0


def test_a_head_that_never_ends_is_refused(asker: Asker) -> None:
    async def run(url: str) -> tuple[Answer, int]:
        async with connected(url) as connection, asyncio.timeout(WAIT_S):
            connection.writer.write(b"GET /health HTTP/1.1\r\nhost: server\r\nx-long: ")
            num_sent = 0
            with contextlib.suppress(ConnectionError):
                while num_sent < 64 * MAX_HEAD_BYTES and not connection.reader.at_eof():
                    connection.writer.write(b"x" * 4096)
                    await connection.writer.drain()
                    await asyncio.sleep(0)
                    num_sent += 4096
            return await connection.answer(), num_sent

    with listening(asker) as url:
        answer, num_sent = asyncio.run(run(url))
        assert num_sent < 64 * MAX_HEAD_BYTES, "the server closes the connection"
        assert answer.status in (400, None), "a reset may overtake the answer"
        again = asyncio.run(ask(url, "/health"))
    assert again.status == 200


@pytest.mark.parametrize("where", ["target", "header", "headers"])
def test_a_large_head_in_one_packet_is_refused(asker: Asker, where: str) -> None:
    long = "x" * 100_000
    head = {
        "target": f"GET /health?{long} HTTP/1.1\r\nhost: server\r\n",
        "header": f"GET /health HTTP/1.1\r\nhost: server\r\nx-long: {long}\r\n",
        "headers": "GET /health HTTP/1.1\r\nhost: server\r\n" + "x-some: 12345\r\n" * 8000,
    }[where]

    async def run(url: str) -> Answer:
        async with connected(url) as connection, asyncio.timeout(WAIT_S):
            connection.writer.write(f"{head}\r\n".encode())
            return await connection.answer()

    with listening(asker) as url:
        answer = asyncio.run(run(url))
        again = asyncio.run(ask(url, "/health"))
    assert answer.status in (400, None), "a reset may overtake the answer"
    assert answer.status is None or b"65536 bytes" in answer.body
    assert again.status == 200


def test_a_body_is_not_counted_as_a_head(asker: Asker) -> None:
    """The whole of a request, larger than a head may be, arrives in one packet."""

    async def run(url: str) -> None:
        body = {**BODY, "prompt_cache_key": "x" * 2 * MAX_HEAD_BYTES}
        async with connected(url) as connection, asyncio.timeout(WAIT_S):
            for _ in range(3):
                connection.send(COMPLETIONS, body)
                answer = await connection.answer()
                assert (answer.status, answer.is_whole) == (200, True), answer.body

    with listening(asker) as url:
        asyncio.run(run(url))


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nhost: "])
def test_a_head_that_stops_in_the_middle_is_refused(
    asker: Asker, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(heads, "HEAD_TIMEOUT_S", 0.3)

    async def run(url: str) -> Answer:
        async with connected(url) as connection, asyncio.timeout(WAIT_S):
            connection.writer.write(sent)
            answer = await connection.answer()
            assert await connection.reader.read() == b""
            return answer

    with listening(asker) as url:
        answer = asyncio.run(run(url))
    assert answer.status == 400
    assert "took more than 0.3 s" in json.loads(answer.body)["error"]["message"]


@pytest.mark.parametrize("sent", [b"GARBAGE\r\n\r\n", b"GET /health HTTP/1.1\r\nno colon\r\n\r\n"])
def test_a_head_that_is_not_http_is_refused_as_other_errors_are(asker: Asker, sent: bytes) -> None:
    async def run(url: str) -> Answer:
        async with connected(url) as connection, asyncio.timeout(WAIT_S):
            connection.writer.write(sent)
            answer = await connection.answer()
            assert await connection.reader.read() == b""
            return answer

    with listening(asker) as url:
        answer = asyncio.run(run(url))
    assert (answer.status, answer.headers["content-type"]) == (400, "application/json")
    error = json.loads(answer.body)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("Invalid HTTP request")


def test_requests_of_one_connection_have_a_time_each(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "HEAD_TIMEOUT_S", 0.5)

    async def run(url: str) -> None:
        async with connected(url) as connection, asyncio.timeout(WAIT_S):
            for _ in range(4):
                connection.send("/health")
                assert (await connection.answer()).status == 200
                await asyncio.sleep(0.2)

    with listening(asker) as url:
        asyncio.run(run(url))


def test_answers_come_over_tls(asker: Asker, tmp_path: Path) -> None:
    import httpx

    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {cert} -days 2 "
        "-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1",
        shell=True, check=True, capture_output=True, timeout=WAIT_S,
    )  # fmt: skip
    trust = ssl.create_default_context(cafile=str(cert))
    with listening(asker, tls_cert=str(cert), tls_key=str(key)) as url:
        assert url.startswith("https://")
        answer = httpx.post(f"{url}{COMPLETIONS}", json=BODY, verify=trust, timeout=120)
        assert answer.status_code == 200
        plain = asyncio.run(ask(url.replace("https", "http"), "/health"))
        assert plain.status is None
