"""Bodies that are cut off, too large or of another type, over a socket; and what is no HTTP."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.server.in_process_client import Asker
from tests.server.raw import RawClient
from tests.server.test_connections import COMPLETIONS, WAIT_S, listening
from tests.server.wire import Answer, connected

HEAD = "POST /v1/completions HTTP/1.1\r\nhost: server\r\ncontent-type: application/json\r\n"
BODY = b'{"prompt": "One day", "max_tokens": 1}'


def exchange(asker: Asker, *parts: bytes) -> Answer:
    """The answer to bytes that are sent on one connection."""

    async def run(url: str) -> Answer:
        async with connected(url) as connection, asyncio.timeout(WAIT_S):
            for part in parts:
                connection.writer.write(part)
            return await connection.answer()

    with listening(asker) as url:
        return asyncio.run(run(url))


def code_of(answer: Answer) -> str | None:
    code: str | None = json.loads(answer.body)["error"]["code"]
    return code


def test_a_large_body_is_refused_before_it_is_sent(asker: Asker) -> None:
    small = Asker(asker.llm, max_body_bytes=1000)
    answer = exchange(small, f"{HEAD}content-length: 1000000\r\n\r\n".encode())
    assert (answer.status, code_of(answer)) == (413, "request_too_large")


def test_a_large_body_in_chunks_is_refused(asker: Asker) -> None:
    small = Asker(asker.llm, max_body_bytes=1000)
    chunk = b"1f4\r\n" + b" " * 500 + b"\r\n"
    answer = exchange(small, f"{HEAD}transfer-encoding: chunked\r\n\r\n".encode(), *[chunk] * 4)
    assert (answer.status, code_of(answer)) == (413, "request_too_large")


@pytest.mark.parametrize(
    "field", ["content-type: text/plain", "content-encoding: gzip", "content-type:"]
)
def test_a_body_of_another_type_is_refused(asker: Asker, field: str) -> None:
    head = HEAD if "encoding" in field else HEAD.replace("content-type: application/json\r\n", "")
    answer = exchange(asker, f"{head}{field}\r\ncontent-length: 2\r\n\r\n{{}}".encode())
    assert (answer.status, code_of(answer)) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    "given", [b"what is this\r\n\r\n", HEAD.encode() + b"content-length: many\r\n\r\n"]
)
def test_what_is_no_http_has_an_error_of_the_same_form(asker: Asker, given: bytes) -> None:
    answer = exchange(asker, given)
    assert answer.status == 400
    assert answer.headers["content-type"] == "application/json"
    assert code_of(answer) is None


def test_a_body_that_is_cut_off_runs_nothing(asker: Asker) -> None:
    """The part that arrived is a valid body, of which the client has announced more."""

    async def run() -> int | None:
        client = RawClient(asker.app, COMPLETIONS, BODY)
        first = client.messages.get_nowait()
        client.messages.put_nowait({**first, "more_body": True})
        client.leave()
        await asyncio.wait_for(client.task, WAIT_S)
        return client.status

    assert asyncio.run(run()) == 499
    assert sum(asker.state.metrics.of["demo"].num_ended.values()) == 0
