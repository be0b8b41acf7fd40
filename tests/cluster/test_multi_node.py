"""Replicas in a cluster of Ray that was started before, as on several machines."""

from __future__ import annotations

import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.client import answered, body_of, client, listening, processes_named, streams
from tests.cluster.conftest import FLAGS, KEY
from tests.ports import free_port
from tests.server.process import ServerProcess, is_running, refused

RAY = [sys.executable, "-m", "ray.scripts.scripts"]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a running cluster of this machine."""
    folder = tempfile.mkdtemp(prefix="eb-", dir="/tmp")  # paths of Ray's sockets must be short
    for name, value in {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "ENGINEBAY_API_KEY": KEY,
    }.items():
        monkeypatch.setenv(name, value)
    port = free_port()
    head = subprocess.Popen(
        [*RAY, "start", "--head", "--block", f"--port={port}", f"--temp-dir={folder}",
         "--include-dashboard=false", "--num-cpus=1", "--object-store-memory=83886080"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        head.wait(60)


def test_a_running_cluster_runs_the_replicas_and_outlives_the_server(
    cluster: str, tmp_path: Path
) -> None:
    store = str(tmp_path / "responses.sqlite")
    flags = ("--replicas", "2", "--ray-address", cluster, "--response-store", store, *FLAGS)
    others = processes_named("ray::ReplicaActor")
    with ServerProcess(*flags) as server:
        server.wait_for("ready: 2 replicas answer requests")
        found = streams(server, [body_of(f"{one}{one} is a number", 8) for one in range(8)])
        assert {stream.events[-1] for stream in found} == {"[DONE]"}
        assert sum(answered(server).values()) == 8
        with client(server) as http:
            made = http.post("/v1/responses", json={"input": "Hello!", "max_output_tokens": 2})
            assert http.get(f"/v1/responses/{made.json()['id']}").status_code == 200
        replicas = [pid for pid in processes_named("ray::ReplicaActor") if pid not in others]
        assert len(replicas) == 2
        assert not set(replicas) & set(server.children), "Ray's processes started them"
        hosts = {host for pid in replicas for host, _ in listening(pid)}
        assert "0.0.0.0" not in hosts
        server.terminate()
        assert server.exit_code() == 0
        assert not [pid for pid in replicas if is_running(pid)]
    status = subprocess.run(
        [*RAY, "status", f"--address={cluster}"], capture_output=True, text=True, check=False
    )
    assert status.returncode == 0, "the cluster still runs"


def test_a_cluster_that_does_not_run_is_one_line(tmp_path: Path) -> None:
    flags = ("--replicas", "2", "--ray-address", "127.0.0.1:1", "--port", "0")
    line = refused("demo", *flags, "--response-store", str(tmp_path / "responses.sqlite"))
    assert "--ray-address 127.0.0.1:1" in line
    assert line.endswith("Pass its address, or leave --ray-address out.")
