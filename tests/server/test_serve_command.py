"""`enginebay serve` from its start to its end: one line for what is wrong, warm-up, drain."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.server.process import ServerProcess, is_running, refused

LONG: dict[str, Any] = {"prompt": "One day", "max_tokens": 200, "ignore_eos": True, "stream": True}
REGEX = "[a-z ]{140,160}"
SCHEMA = {"type": "array", "items": {"type": "boolean"}, "minItems": 25, "maxItems": 25}
GUIDED: dict[str, Any] = {"prompt": "One", "max_tokens": 240, "stream": True}


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused("demo", "--port", str(port))
    assert f"--port {port} at 127.0.0.1, which cannot be opened" in line
    assert "--port 70000. Allowed: 0 to 65535" in refused("demo", "--port", "70000")


def test_a_wrong_file_is_one_line(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    assert missing in refused("demo", "--api-key-file", missing)
    assert missing in refused("demo", "--chat-template", missing)
    assert missing in refused("demo", "--tls-cert", missing, "--tls-key", missing)
    assert "Pass both" in refused("demo", "--tls-cert", missing)


def test_a_model_that_cannot_be_served_is_one_line(tmp_path: Path) -> None:
    assert str(tmp_path) in refused(str(tmp_path), "--port", "0")
    too_large = refused("demo", "--port", "0", "--set", "engine.num_pages=100000000")
    assert "memory" in too_large or "num_pages" in too_large


def test_names_must_fit_the_models() -> None:
    line = refused("demo", "--served-model-name", "a", "--served-model-name", "b")
    assert "Pass --served-model-name once for each MODEL" in line
    assert "one of the two" in refused("demo", "--model", "demo")


def test_a_limit_out_of_range_is_one_line() -> None:
    assert "max_n = 0. Allowed: 1 or more" in refused("demo", "--max-n", "0")


def stream(url: str, body: dict[str, Any], took: list[str], began: threading.Event) -> None:
    import httpx

    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if line:
                took.append(line.removeprefix("data: "))
                began.set()


@contextlib.contextmanager
def streaming(url: str, body: dict[str, Any] = LONG):  # type: ignore[no-untyped-def]
    """Within the block a stream is under way; its events are there after it."""
    took: list[str] = []
    began = threading.Event()
    thread = threading.Thread(target=stream, args=(url, body, took, began))
    thread.start()
    assert began.wait(60)
    yield took
    thread.join(60)
    assert not thread.is_alive()


def test_accepted_requests_are_answered_after_a_signal() -> None:
    import httpx

    flags = ("--warmup", "lazy", "--decode-steps", "1", "--drain-timeout", "60")
    with ServerProcess(*flags) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        client.post("/v1/completions", json={**LONG, "max_tokens": 1, "stream": False})
        choice = {"prompt": "One", "guided_choice": ["a"]}  # guides run in processes of their own
        assert client.post("/v1/completions", json=choice).status_code == 200
        children = server.children
        assert children
        with streaming(server.url) as took:
            server.terminate()
            refusal = client.post("/v1/completions", json=LONG)
            while refusal.status_code == 200:
                refusal = client.post("/v1/completions", json={**LONG, "max_tokens": 1})
            assert refusal.status_code == 503
            assert client.get("/readiness").status_code == 503
        assert took[-1] == "[DONE]"
        assert json.loads(took[-2])["choices"][0]["finish_reason"] == "length"
        assert server.exit_code() == 0
        assert not [pid for pid in children if is_running(pid)]


@pytest.mark.parametrize("form", [{"guided_regex": REGEX}, {"guided_json": SCHEMA}])
def test_a_guided_stream_ends_whole_after_a_signal_to_every_process(form: dict[str, Any]) -> None:
    """As a supervisor stops a service; the processes that follow constraints get it too."""
    flags = ("--warmup", "lazy", "--decode-steps", "1", "--drain-timeout", "60")
    with ServerProcess(*flags) as server:
        with streaming(server.url, {**GUIDED, **form}) as took:
            begun, children = len(took), server.children
            assert children
            for pid in (server.pid, *children):
                os.kill(pid, signal.SIGTERM)
            until_s = time.monotonic() + 60
            while len(took) < begun + 10 and time.monotonic() < until_s:
                time.sleep(0.005)
            assert all(map(is_running, children)), "the stream needs them"
        assert server.exit_code() == 0
        assert not [pid for pid in children if is_running(pid)]
    assert took[-1] == "[DONE]"
    assert len(took) > begun + 20, "the signal came too late"
    choices = [json.loads(event)["choices"][0] for event in took[:-1]]
    assert choices[-1]["finish_reason"] == "stop"
    text = "".join(choice["text"] for choice in choices)
    if "guided_regex" in form:
        assert re.fullmatch(REGEX, text)
    else:
        assert len(json.loads(text)) == 25


def test_what_outlasts_the_drain_timeout_ends_with_an_error() -> None:
    with ServerProcess("--warmup", "lazy", "--decode-steps", "1", "--drain-timeout", "0") as server:
        with streaming(server.url) as took:
            server.terminate()
        assert json.loads(took[-1])["error"]["code"] == "engine_stopped"
        assert server.exit_code() == 0


def test_a_server_answers_while_it_compiles() -> None:
    import httpx

    few = ("--max-model-len", "160", "--max-num-seqs", "2", "--max-num-batched-tokens", "160")
    with ServerProcess(*few) as server:
        server.wait_for("ready: requests are answered while the other programs are compiled")
        status = httpx.get(f"{server.url}/readiness").json()["models"]["demo"]
        assert (status["ready"], status["warmup"]) == (True, "ready")
        assert status["compiled"] < status["programs"]
        explained = httpx.get(f"{server.url}/explain").json()["demo"]["compiling"]
        assert "are compiled beside the requests" in explained
        body = {"model": "demo", "prompt": "The snail " * 36, "max_tokens": 8, "temperature": 0}
        first = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        assert 'programs_coming{model_name="demo"}' in httpx.get(f"{server.url}/metrics").text
        server.wait_for("ready: every program is compiled")
        assert 'programs_coming{model_name="demo"} 0.0' in httpx.get(f"{server.url}/metrics").text
        status = httpx.get(f"{server.url}/readiness").json()["models"]["demo"]
        assert "programs" not in status
        again = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        assert again["choices"] == first["choices"]


def test_a_server_is_ready_when_every_program_is_compiled() -> None:
    import httpx

    least = ("--max-model-len", "64", "--max-num-seqs", "1", "--max-num-batched-tokens", "16")
    with ServerProcess(*least) as server:
        assert httpx.get(f"{server.url}/liveness").status_code == 200
        server.wait_for("ready: every program is compiled")
        assert httpx.get(f"{server.url}/readiness").status_code == 200
        name = 'enginebay:compilations_total{model_name="demo"}'

        def count() -> str:
            text = httpx.get(f"{server.url}/metrics").text
            [line] = [line for line in text.splitlines() if line.startswith(name)]
            return line

        before = count()
        for fields in ({}, {"temperature": 1.0, "logprobs": 2}, {"logit_bias": {"5": 1.0}}):
            body = {"prompt": "One day", "max_tokens": 3, **fields}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
        assert count() == before
        embedding = httpx.post(f"{server.url}/v1/embeddings", json={"input": "One"}, timeout=60)
        assert embedding.status_code == 400
        assert "embeddings = true" in embedding.text
        server.send(signal.SIGINT)
        assert server.exit_code() == 130


def test_without_the_extra_one_line_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.util

    from enginebay.cli.program import main

    found = importlib.util.find_spec
    monkeypatch.setattr(
        "enginebay_server.command.importlib.util.find_spec",
        lambda name: None if name == "fastapi" else found(name),
    )
    assert main(["serve", "demo"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("Install it: pip install 'enginebay[serve]'")
