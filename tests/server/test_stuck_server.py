"""A server whose disk and device hang: it answers the others, and a signal ends it all the same."""

from __future__ import annotations

import queue
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.adapters import write_adapter
from tests.brief import DEMO
from tests.server.process import ServerProcess
from tests.server.stuck_server import END_S

HUNG = [sys.executable, "-m", "tests.server.stuck_server", "serve"]
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
WAIT_S = 120.0
Outcome = queue.SimpleQueue[httpx.Response | Exception]


def sent(server: ServerProcess, path: str, body: object) -> Outcome:
    """Send a request on a thread of its own; its outcome is in the queue when it has one."""
    outcome: Outcome = queue.SimpleQueue()

    def send() -> None:
        try:
            outcome.put(httpx.post(server.url + path, json=body, timeout=WAIT_S))
        except httpx.HTTPError as error:
            outcome.put(error)

    threading.Thread(target=send, daemon=True).start()
    return outcome


@pytest.mark.parametrize("engine_hangs", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_signal_ends_a_server_whose_adapter_or_engine_hangs(
    engine_hangs: bool, tmp_path: Path
) -> None:
    flag = tmp_path / "hang"
    folder = write_adapter(tmp_path / "adapter", str(DEMO), seed=1)
    flags = ("--max-loras", "1", "--lora-routes", "--drain-timeout", "1")
    environment = {"ENGINEBAY_TESTS_HANG": str(flag)}
    with ServerProcess(*flags, command=HUNG, environment=environment) as server:
        server.wait_for("ready")
        named = {"lora_name": "a", "lora_path": str(folder)}
        load = sent(server, "/v1/load_lora_adapter", named)
        time.sleep(0.5)
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/tokenize", {"prompt": "a"}),
            ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
        ):
            answer = httpx.post(server.url + path, json=body, timeout=WAIT_S)
            assert answer.status_code == 200, answer.text
        assert httpx.get(f"{server.url}/ui/", timeout=WAIT_S).status_code == 200
        assert load.empty()
        if engine_hangs:
            flag.touch()
            chat = sent(server, "/v1/chat/completions", CHAT)
            figures = httpx.get(f"{server.url}/metrics", timeout=WAIT_S)
            assert figures.status_code == 200
            assert chat.empty()
        began_s = time.monotonic()
        server.terminate()
        assert server.exit_code() == 0
        assert time.monotonic() - began_s < 1 + 2 * END_S + 20
    for outcome in (load, *([chat] if engine_hangs else [])):
        answer = outcome.get(timeout=WAIT_S)
        assert isinstance(answer, httpx.Response), answer
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "request_aborted"
    errors = "".join(server.errors)
    assert "Traceback" not in errors
    assert ("the server has not ended after" in errors) == engine_hangs
    assert not engine_hangs or "enginebay-loop" in errors
