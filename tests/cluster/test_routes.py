"""Every route answers through the front as a server without replicas does."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.cluster.client import (
    HEADERS,
    answered,
    body_of,
    client,
    listening,
    processes,
    samples,
    streams,
    until,
)
from tests.server.process import ServerProcess

HELLO = [{"role": "user", "content": "Hello!"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED: list[tuple[str, str, Any]] = [
    ("POST", CHAT, {"messages": HELLO, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}),
    ("POST", CHAT, {"messages": HELLO, "max_tokens": 6, "stream": True, "n": 2, "seed": 1}),
    ("POST", CHAT, {"messages": "wrong"}),
    ("POST", CHAT, {"messages": HELLO, "temperature": 0.123456789012345, "seed": 1}),
    ("POST", CHAT, {"messages": HELLO, "max_tokens": 3, "guided_choice": ["yes", "no"]}),
    ("POST", TEXT, {"prompt": "One day", "max_tokens": 6, "echo": True}),
    ("POST", TEXT, {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 3}),
    ("POST", TEXT, {"prompt": "One day", "max_tokens": 3, "max_token": 4}),
    ("POST", TEXT, {"prompt": "One day", "suffix": "end"}),
    ("POST", TEXT, {"model": "other", "prompt": "One day"}),
    ("POST", TEXT, b'{"prompt": "half of a pair \\ud800", "max_tokens": 2}'),
    ("POST", TEXT, b'{"prompt": "x", "seed": 123456789012345678901234567890}'),
    ("POST", TEXT, b"no JSON"),
    ("POST", TEXT, b"[1]"),
    ("POST", TEXT, b""),
    ("POST", "/v1/responses", {"input": "Hello!", "max_output_tokens": 4}),
    ("POST", "/v1/responses", {"input": "Hello!", "max_output_tokens": 4, "stream": True}),
    ("POST", "/v1/responses", {"input": "Hello!", "previous_response_id": "resp_none"}),
    ("POST", "/v1/messages", {"messages": HELLO, "max_tokens": 4, "model": "demo"}),
    ("POST", "/v1/messages", {"messages": HELLO, "max_tokens": 4, "stream": True}),
    ("POST", "/v1/messages", {"messages": []}),
    ("POST", "/v1/messages/count_tokens", {"messages": HELLO}),
    ("POST", "/v1/embeddings", {"input": "One day"}),
    ("POST", "/v1/count_tokens", {"prompt": "One day"}),
    ("POST", "/tokenize", {"prompt": "One day"}),
    ("POST", "/detokenize", {"tokens": [5, 6, 7]}),
    ("GET", "/v1/responses/resp_none", None),
    ("DELETE", "/v1/responses/resp_none", None),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/demo", None),
    ("GET", "/v1/models/none", None),
    ("GET", "/liveness", None),
    ("GET", "/version", None),
    ("GET", "/explain", None),
    ("GET", "/ui", None),
    ("GET", "/ui/", None),
    ("GET", "/ui/page.js", None),
    ("GET", "/ui/none", None),
    ("GET", "/openapi.json", None),
    ("GET", "/nothing?at=all", None),
    ("GET", TEXT, None),
    ("HEAD", "/version", None),
    ("PUT", "/metrics", None),
]
CHANGING = re.compile(
    r'"(created|created_at|completed_at|id|item_id|response_id)":\s*("[^"]*"|[\d.]+)'
    r"|(resp|msg|fc|rs|cmpl|chatcmpl|call)_?-?[0-9a-f]{16,}"
)


def same(answer: Any) -> tuple[int, dict[str, str], str]:
    """Status, headers and body without ids and times, and without the bounds of chunks."""
    kept = ("content-type", "cache-control", "x-accel-buffering", "location", "allow")
    headers = {name: answer.headers[name] for name in kept if name in answer.headers}
    text = CHANGING.sub("", answer.text)
    if headers.get("content-type", "").startswith("text/event-stream"):
        text = "".join(
            sorted(set(re.findall(r'event: \S+|"type":"\S+?"|\[DONE\]|finish_reason":"\w+', text)))
        )
    return answer.status_code, headers, text


@pytest.mark.parametrize(("method", "path", "body"), ASKED)
def test_an_answer_is_that_of_a_server_without_replicas(
    server: ServerProcess, alone: ServerProcess, method: str, path: str, body: Any
) -> None:
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    sent = {"content": content, "headers": {"content-type": "application/json"}}
    with client(server) as ours, client(alone) as theirs:
        assert same(ours.request(method, path, **sent)) == same(
            theirs.request(method, path, **sent)
        )


def test_the_text_of_a_stream_is_that_of_one_process(
    server: ServerProcess, alone: ServerProcess
) -> None:
    bodies = [body_of(f"{name} saw a", 24) for name in ("Tom", "Sue", "Pip", "Ann")]
    found, expected = streams(server, bodies), streams(alone, bodies)
    assert [one.text for one in found] == [one.text for one in expected]
    assert {one.events[-1] for one in found} == {"[DONE]"}


def test_a_header_of_a_request_reaches_its_replica(server: ServerProcess) -> None:
    with client(server) as http:
        answer = http.get("/version", headers={"x-request-id": "named-by-the-test"})
    assert answer.headers.get_list("x-request-id") == ["named-by-the-test"]


def test_keys_are_checked_at_the_front_and_replicas_have_another(server: ServerProcess) -> None:
    import httpx

    for path in ("/v1/models", "/metrics", "/ui/data", "/explain"):
        answer = httpx.get(f"{server.url}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    for path in ("/liveness", "/health", "/readiness", "/ui/"):
        assert httpx.get(f"{server.url}{path}").status_code == 200
    replicas = processes(server, "ReplicaActor")
    assert len(replicas) == 2
    for pid in replicas:
        [(host, port)] = listening(pid)
        assert host == "127.0.0.1"
        for headers in ({}, HEADERS):
            answer = httpx.get(f"http://{host}:{port}/v1/models", headers=headers)
            assert answer.status_code == 401


def test_the_same_limits_hold_at_the_front(server: ServerProcess) -> None:
    with client(server) as http:
        plain = http.post(TEXT, content=b'{"prompt": "One day"}')
        assert (plain.status_code, plain.json()["error"]["code"]) == (415, "unsupported_media_type")
        typed = {"content-type": "application/json"}
        big = http.post(TEXT, content=b'{"prompt": "' + b"x" * 9 * 2**20 + b'"}', headers=typed)
        assert (big.status_code, big.json()["error"]["code"]) == (413, "request_too_large")


def test_metrics_name_the_replica_of_each_sample(server: ServerProcess) -> None:
    streams(server, [body_of(f"{number} is a number", 30) for number in range(16)])
    counts = answered(server)
    assert set(counts) == {"0", "1"}
    assert min(counts.values()) > 0
    assert samples(server, "replica_up") == {"0": 1, "1": 1}
    with client(server) as http:
        text = http.get("/metrics").text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all('{replica="' in line for line in lines)
    types = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types)) == len({line.split()[2] for line in types})


def test_prompts_with_the_same_beginning_go_to_the_same_replica(server: ServerProcess) -> None:
    for story in ("the red boat that crossed a lake", "a small dog who found a big bone"):
        before = answered(server)
        beginning = f"This is {story}. " * 4
        for end in ("One", "Two", "Three", "Four"):
            [found] = streams(server, [body_of(beginning + end, 2)])
            assert found.status == 200
        after = answered(server)
        assert sorted(after[one] - before[one] for one in after) == [0, 4]


def test_stored_responses_are_shared(server: ServerProcess) -> None:
    before = answered(server)
    with client(server) as http:
        made = []
        while len(made) < 4 or min(answered(server)[one] - before[one] for one in before) == 0:
            assert len(made) < 40
            words = f"{len(made)}: this beginning is like no other. " * 3
            body = {"input": words, "max_output_tokens": 2}
            made.append(http.post("/v1/responses", json=body).json()["id"])
        for one in made:
            assert http.get(f"/v1/responses/{one}").json()["id"] == one
            more = {"input": "More", "max_output_tokens": 2, "previous_response_id": one}
            assert http.post("/v1/responses", json=more).json()["previous_response_id"] == one
            assert http.delete(f"/v1/responses/{one}").json()["deleted"]
            assert http.get(f"/v1/responses/{one}").status_code == 404


def test_a_client_that_leaves_ends_its_request(server: ServerProcess) -> None:
    def aborted() -> float:
        counts = samples(server, "request_success_total", finished_reason="abort")
        return sum(counts.values())

    before = aborted()
    with client(server) as http:
        for stream in (True, False):
            body = {**body_of("A client that leaves", 200), "stream": stream}
            if stream:
                with http.stream("POST", TEXT, json=body) as answer:
                    next(answer.iter_lines())
            else:
                import httpx

                with pytest.raises(httpx.ReadTimeout):
                    httpx.post(f"{server.url}{TEXT}", json=body, headers=HEADERS, timeout=0.05)
    until(lambda: aborted() == before + 2)
    until(lambda: sum(samples(server, "num_requests_running").values()) == 0)


def test_the_page_shows_each_replica(server: ServerProcess) -> None:
    with client(server) as http:
        first = http.get("/ui/data").json()
        assert [(one["name"], one["replica"]) for one in first["models"]] == [
            ("demo", 0),
            ("demo", 1),
        ]
        assert first["ready"]
        assert all(one["records"] for one in first["models"])
        since = ",".join(str(one["next"]) for one in first["models"])
        again = http.get("/ui/data", params={"since": since}).json()
        assert not any(one["records"] for one in again["models"])
