"""What the tests ask a server with replicas."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.conftest import KEY
from tests.server.process import ServerProcess

HEADERS = {"authorization": f"Bearer {KEY}"}
WAIT_S = 120


def client(server: ServerProcess) -> Any:
    import httpx

    return httpx.Client(base_url=server.url, headers=HEADERS, timeout=WAIT_S)


def until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s, "it does not come to pass"
        time.sleep(0.1)


def are_ready(server: ServerProcess) -> bool:
    with client(server) as http:
        states = http.get("/readiness").json()["replicas"]
    return set(states.values()) == {"ready"}


def samples(server: ServerProcess, name: str, **labels: str) -> dict[str, float]:
    """The values of a metric by replica."""
    from prometheus_client.parser import text_string_to_metric_families

    with client(server) as http:
        text = http.get("/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"enginebay:{name}" and labels.items() <= sample.labels.items():
                found[sample.labels["replica"]] = sample.value
    return found


def answered(server: ServerProcess) -> dict[str, float]:
    """Completions that each replica has ended by their length."""
    return samples(server, "request_success_total", finished_reason="length")


class Stream:
    """A stream of text: its status, events, and the error that ended the connection."""

    def __init__(self) -> None:
        self.status = 0
        self.events: list[str] = []
        self.body = b""
        self.failure: Exception | None = None

    @property
    def error(self) -> dict[str, Any] | None:
        """The error of the answer or of its last event."""
        found = self.body if self.status != 200 else self.events[-1].encode()
        record = json.loads(found) if found.startswith(b"{") else {}
        error: dict[str, Any] | None = record.get("error")
        return error

    @property
    def text(self) -> str:
        events = [json.loads(event) for event in self.events if event.startswith('{"id"')]
        return "".join(event["choices"][0]["text"] for event in events)


def body_of(prompt: str, max_tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}


async def run_stream(http: Any, stream: Stream, body: dict[str, Any]) -> None:
    import httpx

    try:
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            stream.status = answer.status_code
            if answer.status_code != 200:
                stream.body = await answer.aread()
            async for line in answer.aiter_lines():
                if line:
                    stream.events.append(line.removeprefix("data: "))
    except httpx.HTTPError as error:
        stream.failure = error


def streams(
    server: ServerProcess,
    bodies: Sequence[dict[str, Any]],
    meanwhile: Callable[[Sequence[Stream]], object] | None = None,
) -> Sequence[Stream]:
    """Run streams at the same time; `meanwhile` runs once each has begun."""
    import httpx

    async def run() -> list[Stream]:
        found = [Stream() for _ in bodies]
        limits = httpx.Limits(max_connections=len(bodies) + 1)
        async with httpx.AsyncClient(
            base_url=server.url, headers=HEADERS, timeout=WAIT_S, limits=limits
        ) as http:
            tasks = [
                asyncio.ensure_future(run_stream(http, stream, body))
                for stream, body in zip(found, bodies, strict=True)
            ]
            if meanwhile is not None:
                async with asyncio.timeout(WAIT_S):
                    while not all(stream.events or stream.status > 200 for stream in found):
                        await asyncio.sleep(0.01)
                await asyncio.to_thread(meanwhile, found)
            await asyncio.gather(*tasks)
        return found

    return asyncio.run(run())


def title(pid: int) -> str:
    """The title of a process; "" after its end."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def processes(server: ServerProcess, name: str) -> list[int]:
    """Child processes of a server by their title."""
    return [pid for pid in server.children if name in title(pid)]


def processes_named(name: str) -> list[int]:
    """Processes of this machine by the beginning of their title."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if title(pid).startswith(name)]


def listening(pid: int) -> list[tuple[str, int]]:
    """IPv4 addresses at which a process listens."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(str(link.readlink()))
        except OSError:
            continue
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            address, port = fields[1].split(":")
            octets = bytes.fromhex(address)[::-1]
            found.append((".".join(map(str, octets)), int(port, 16)))
    return found
