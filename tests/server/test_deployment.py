"""The files of deploy/: the container's steps, the systemd unit, and reverse proxies."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from enginebay_server.command import add_arguments
from enginebay_server.ingress import PROBES
from tests.ports import free_port
from tests.server.containerfile import Stages, last, read
from tests.server.test_connections import listening
from tools.reference_tables import with_tables

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PAGE = ROOT / "docs" / "deployment.md"
WAIT_S = 60


def flags_of(arguments: list[str]) -> argparse.Namespace:
    """The flags of `enginebay serve`, which must know them all."""
    assert arguments[0] == "serve"
    parser = argparse.ArgumentParser()
    add_arguments("serve", parser)
    return parser.parse_args(arguments[1:])


def named(lines: str, name: str) -> str:
    """The value of a line NAME=VALUE."""
    found = re.search(rf"^{name}=(.*)$", lines, re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("name", ["Containerfile", "enginebay.service", "nginx.conf", "Caddyfile"])
def test_the_page_shows_each_file(name: str) -> None:
    assert (DEPLOY / name).read_text() in with_tables(PAGE.read_text())


def test_the_container_starts_the_server_with_flags_that_it_knows() -> None:
    steps = read(DEPLOY / "Containerfile")
    entry = last(steps, "ENTRYPOINT").words
    assert entry[0] == "enginebay"
    flags = flags_of([*entry[1:], *last(steps, "CMD").words])
    assert (flags.host, flags.models) == ("0.0.0.0", ["demo"])
    assert last(steps, "EXPOSE").rest == str(flags.port)
    assert last(steps, "USER").rest == "enginebay"
    check = " ".join(last(steps, "HEALTHCHECK").words)
    found = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", check)
    assert found is not None
    assert (int(found[1]), found[2] in PROBES) == (flags.port, True)
    stages = [step.rest for step in steps if step.word == "FROM"]
    versions = {re.match(r"python:(\d\.\d+)", stage)[1] for stage in stages}  # type: ignore[index]
    assert len(versions) == 1, "the environment of one stage is used in the other"


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    unit = (DEPLOY / "enginebay.service").read_text()
    command = shlex.split(named(unit, "ExecStart"))
    flags = flags_of(command[1:])
    assert int(named(unit, "TimeoutStopSec")) > flags.drain_timeout
    assert named(unit, "KillMode") == "mixed", "a stop's signal goes to the server alone"
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    copy = tmp_path / "enginebay.service"
    copy.write_text(unit.replace(command[0], sys.executable).replace("User=enginebay\n", ""))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    ours = [line for line in done.stderr.splitlines() if "enginebay.service" in line]
    assert (done.returncode, ours) == (0, [])


class Upstream:
    """An application that sends an event. Then it waits until its client has received the event, or
    at the path /left until its client has left.
    """

    def __init__(self) -> None:
        self.received = threading.Event()
        self.left = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        if scope["path"] == "/left":
            assert (await receive())["type"] == "http.disconnect"
            self.left.set()
        elif await asyncio.to_thread(self.received.wait, WAIT_S):
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


@contextlib.contextmanager
def proxied(name: str, folder: Path, upstream: str) -> Iterator[tuple[str, ssl.SSLContext]]:
    """The address of a proxy with its file of deploy/, whose names and ports are those of here."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {cert} -days 2 "
        "-subj /CN=localhost -addext subjectAltName=DNS:localhost",
        shell=True, check=True, capture_output=True, timeout=WAIT_S,
    )  # fmt: skip
    port = free_port()
    text = (DEPLOY / name).read_text().replace("127.0.0.1:8000", upstream.removeprefix("http://"))
    file = folder / name
    if name == "nginx.conf":
        text = text.replace("listen 443", f"listen 127.0.0.1:{port}")
        text = text.replace("/etc/ssl/models.example.pem", str(cert))
        text = text.replace("/etc/ssl/models.example.key", str(key))
        temps = "".join(
            f"{one}_temp_path {folder}/{one};\n"
            for one in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        text = (
            f"pid {folder}/pid; daemon off; events {{}}\nhttp {{ access_log off; {temps}{text} }}"
        )
        if subprocess.run(["id", "-u"], capture_output=True, text=True, check=True).stdout == "0\n":
            text = f"user root;\n{text}"
        command = ["nginx", "-e", str(folder / "errors"), "-p", str(folder), "-c", str(file)]
    else:
        text = text.replace("models.example {", f"localhost:{port} {{\n\ttls {cert} {key}")
        text = f"{{\n\tadmin off\n\tauto_https disable_redirects\n}}\n{text}"
        command = ["caddy", "run", "--adapter", "caddyfile", "--config", str(file)]
    file.write_text(text)
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        end_s = time.monotonic() + WAIT_S
        while True:
            assert process.poll() is None, (folder / "output").read_text()
            assert time.monotonic() < end_s
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield f"https://localhost:{port}", ssl.create_default_context(cafile=str(cert))
    finally:
        process.terminate()
        process.wait(WAIT_S)


@pytest.mark.parametrize(("name", "program"), [("nginx.conf", "nginx"), ("Caddyfile", "caddy")])
def test_a_proxy_sends_each_event_as_it_comes_and_leaves_with_its_client(
    tmp_path: Path, name: str, program: str
) -> None:
    import httpx

    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    upstream = Upstream()
    state = Mock(num_open=0)
    with (
        listening(Mock(app=upstream, state=state)) as at,
        proxied(name, tmp_path, at) as (url, trust),
    ):
        with httpx.Client(base_url=url, verify=trust, timeout=WAIT_S) as client:
            with client.stream("POST", "/v1/completions", json={}) as answer:
                lines = (line for line in answer.iter_lines() if line)
                assert next(lines) == "data: 1"
                upstream.received.set()
                assert next(lines) == "data: [DONE]"
            with client.stream("POST", "/left", json={}) as answer:
                assert next(answer.iter_lines()) == "data: 1"
        assert upstream.left.wait(WAIT_S), "the server learns that the client has left"
        if program == "caddy":
            return  # it leaves the size of a body to the server
        too_large = httpx.post(f"{url}/v1/completions", content=b"a" * 9_000_000, verify=trust)
        assert too_large.status_code == 413


@pytest.mark.slow
def test_the_steps_of_the_container_make_a_server(tmp_path: Path) -> None:
    """Its steps run in a clean virtual environment: this needs no container program."""
    steps = read(DEPLOY / "Containerfile")
    base = Path(sys.executable).resolve()
    stages = Stages(tmp_path, str(base), ROOT)
    stages.run(steps)
    port = free_port()
    command = [*last(steps, "ENTRYPOINT").words, *last(steps, "CMD").words, "--port", str(port)]
    program = shutil.which(command[0], path=stages.environment["PATH"])
    assert program == str(tmp_path / "opt/enginebay/bin/enginebay")
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            [program, *command[1:], "--max-model-len", "64", "--max-num-seqs", "1"],
            env=stages.environment, cwd=tmp_path, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        end_s = time.monotonic() + 300
        while "ready: every program" not in (tmp_path / "output").read_text():
            assert process.poll() is None, (tmp_path / "output").read_text()
            assert time.monotonic() < end_s
            time.sleep(0.2)
        check = [one.replace(":8000", f":{port}") for one in last(steps, "HEALTHCHECK").words]
        python = str(tmp_path / "opt/enginebay/bin" / check[0])
        subprocess.run([python, *check[1:]], check=True, timeout=WAIT_S)
        assert any((tmp_path / "cache").iterdir()), "compiled programs are kept in the volume"
    finally:
        process.terminate()
        assert process.wait(WAIT_S) == 0
