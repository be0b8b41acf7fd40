"""Replicas, the router and the server are killed, and end: what their clients see."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from enginebay.cli.program import main
from tests.cluster.client import (
    Stream,
    answered,
    are_ready,
    body_of,
    client,
    processes,
    samples,
    streams,
    until,
)
from tests.cluster.conftest import FLAGS
from tests.server.process import ServerProcess, is_running, refused

TEXT = "/v1/completions"


@pytest.fixture(autouse=True)
def both_are_ready(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        until(lambda: are_ready(request.getfixturevalue("server")))


def long_bodies(count: int, max_tokens: int = 200) -> list[dict[str, object]]:
    """Prompts without a common beginning, which go to both replicas."""
    return [body_of(f"{number}{number} is the number of a", max_tokens) for number in range(count)]


@pytest.mark.parametrize("turn", [1, 2])
def test_a_killed_replica_ends_its_own_streams_and_returns(
    server: ServerProcess, turn: int
) -> None:
    """The streams of the other replica have the tokens that they have alone."""
    restarts = samples(server, "replica_restarts_total")
    before, victim = answered(server), processes(server, "ReplicaActor")[0]
    killed_at: list[int] = []

    def kill(found: Sequence[Stream]) -> None:
        killed_at.extend(len(stream.events) for stream in found)
        os.kill(victim, signal.SIGKILL)
        assert are_answered(server)

    found = streams(server, long_bodies(6), kill)
    assert min(killed_at) > 0
    broken = [stream for stream in found if stream.error is not None]
    whole = [stream for stream in found if stream.error is None]
    assert broken
    assert whole
    for stream in broken:
        assert stream.failure is None
        assert stream.error is not None
        assert stream.error["code"] == "replica_failed"
        assert "[DONE]" not in stream.events
    assert {stream.events[-1] for stream in whole} == {"[DONE]"}
    until(lambda: are_ready(server))
    now = samples(server, "replica_restarts_total")
    assert sum(now.values()) == sum(restarts.values()) + 1
    [number] = [one for one in now if now[one] > restarts[one]]
    again = streams(server, long_bodies(6))
    assert all(stream.events[-1] == "[DONE]" for stream in again)
    for stream, first in zip(again, found, strict=True):
        assert stream.text.startswith(first.text)
    assert answered(server)[number] > 0, "the replica that returned serves"
    other = next(one for one in now if one != number)
    assert answered(server)[other] > before[other]


def are_answered(server: ServerProcess) -> bool:
    """Whether requests right after a kill are answered."""
    found = streams(server, long_bodies(6, max_tokens=3))
    failed = [(stream.status, stream.error) for stream in found if stream.error is not None]
    assert not failed, failed
    return all(stream.status == 200 for stream in found)


def test_a_killed_router_is_started_again_and_no_stream_notices(server: ServerProcess) -> None:
    [router] = processes(server, "smg::router")

    def kill(_: Sequence[Stream]) -> None:
        os.kill(router, signal.SIGKILL)
        assert are_answered(server)

    found = streams(server, long_bodies(6), kill)
    assert {stream.events[-1] for stream in found} == {"[DONE]"}
    until(lambda: bool(processes(server, "smg::router")))
    assert are_answered(server)


def test_a_stopped_replica_stays_out_of_reach_only_for_its_own(server: ServerProcess) -> None:
    """A process that hangs is not asked for further streams once its probe has failed."""
    victim = processes(server, "ReplicaActor")[0]
    os.kill(victim, signal.SIGSTOP)
    try:
        until(lambda: not are_ready(server))
        assert are_answered(server)
    finally:
        os.kill(victim, signal.SIGCONT)


def test_accepted_requests_are_answered_after_a_signal_and_no_process_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tempfile.mkdtemp(prefix="eb-", dir="/tmp")  # paths of Ray's sockets must be short
    environment = {"TMPDIR": folder}
    with ServerProcess("--replicas", "2", *FLAGS, environment=environment) as server:
        server.wait_for("ready: 2 replicas")
        choice = {"prompt": "One", "guided_choice": ["a"]}  # guides run in processes of their own
        with client(server) as http:
            assert http.post(TEXT, json=choice).status_code == 200
        children = server.children
        assert len(children) > 6
        port = int(server.url.rpartition(":")[2])

        def end(_: Sequence[Stream]) -> None:
            server.terminate()
            with client(server) as http:
                until(lambda: http.get("/readiness").status_code == 503)
                refusal = http.post(TEXT, json={"prompt": "One day"})
            assert refusal.status_code == 503
            assert refusal.json()["error"]["code"] == "server_draining"

        found = streams(server, long_bodies(6), end)
        assert {stream.events[-1] for stream in found} == {"[DONE]"}
        assert server.exit_code() == 0
        assert not [pid for pid in children if is_running(pid)]
        assert not list(Path(folder).iterdir())
        Path(folder).rmdir()
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_stop_that_every_process_gets_is_that_of_the_server() -> None:
    """As systemd's KillMode=control-group sends it, and `kill` to a group."""
    flags = ("--replicas", "2", *FLAGS, "--max-model-len", "1024", "--drain-timeout", "120")
    with ServerProcess(*flags) as server:
        server.wait_for("ready: 2 replicas")
        streams(server, long_bodies(4, 500))  # compiles what the next streams need
        children = server.children
        assert len(processes(server, "ReplicaActor")) == 2

        def end(found: Sequence[Stream]) -> None:
            assert not any("[DONE]" in stream.events for stream in found)
            for pid in (*children, server.pid):
                os.kill(pid, signal.SIGTERM)

        found = streams(server, long_bodies(4, 500), end)
        assert [stream.events[-1] for stream in found] == ["[DONE]"] * 4
        assert server.exit_code() == 0
        assert not [pid for pid in children if is_running(pid)]


def test_a_killed_server_leaves_no_process() -> None:
    with ServerProcess("--replicas", "2", *FLAGS) as server:
        server.wait_for("ready: 2 replicas")
        children = server.children
        assert len(processes(server, "ReplicaActor")) == 2

        found = streams(server, long_bodies(2), lambda _: os.kill(server.pid, signal.SIGKILL))
        assert all(stream.failure is not None for stream in found), "no stream ends as if whole"
        until(lambda: not [pid for pid in children if is_running(pid)])


def test_what_outlasts_the_drain_timeout_ends_with_an_error() -> None:
    with ServerProcess("--replicas", "2", *FLAGS, "--drain-timeout", "0") as server:
        server.wait_for("ready: 2 replicas")
        children = server.children
        streams(server, long_bodies(6))  # compiles what the next streams need
        found = streams(server, long_bodies(6, 230), lambda _: server.terminate())
        late = [stream for stream in found if stream.events[-1] != "[DONE]"]
        assert late, "the signal comes before the last stream has ended"
        errors = [stream.error for stream in late]
        assert {error and error["code"] for error in errors} == {"engine_stopped"}
        assert server.exit_code() == 0
        assert not [pid for pid in children if is_running(pid)]


def test_a_start_of_ray_that_takes_too_long_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray has 30 s to start, and then raises a plain Exception."""
    import ray

    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.")  # noqa: TRY002

    monkeypatch.setattr(ray, "init", init)
    folders = set(Path(tempfile.gettempdir()).glob("enginebay-*"))
    assert main(["serve", "demo", "--port", "0", "--replicas", "2"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "Ray, which cannot be started: Exception: The current node timed out" in line
    assert set(Path(tempfile.gettempdir()).glob("enginebay-*")) <= folders


def test_a_model_that_cannot_be_served_is_one_line(tmp_path: Path) -> None:
    line = refused(str(tmp_path), "--port", "0", "--replicas", "2")
    assert str(tmp_path) in line
