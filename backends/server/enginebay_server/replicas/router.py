"""Chooses the replica of a request by smg. This router sends prompts with the same beginning to
the same replica, but to another one when that replica has too many requests.

smg gets a placement request with the beginning of the prompt. Its workers are not the replicas but
ports of this process, one per replica. The port that smg chooses names the replica, and the
placement stays open until the request has ended, so that smg knows the load of each replica.
Only the beginning of a prompt passes through smg. The rest of it, the answer and the client's API
key do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import subprocess
import sys
from collections.abc import MutableMapping
from typing import Any

import orjson
import uvicorn

from enginebay.waits import wait_for_killed
from enginebay_server.ingress import Receive, Send
from enginebay_server.replicas.exchange import BrokenError, Connection, connect
from enginebay_server.replicas.table import Replica, ReplicaTable

log = logging.getLogger("enginebay.server")

HOST = "127.0.0.1"
MODEL = "replica"
"""The one model that smg knows; the real name is at the beginning of the text."""
MAX_TEXT = 32768
"""Max characters of a prompt that smg gets."""
PLACE_S = 2.0
"""Max seconds of a placement; then the replica with the fewest requests is chosen."""
START_S = 60.0
POLL_S = 0.1


class PlacedRequest:
    """The replica of one request, and a connection to it, until `end`."""

    def __init__(self, replica: Replica, held: Connection | None) -> None:
        """`held`: the connection to smg on which the placement is open."""
        self.replica = replica
        self.connection = Connection()
        self._held = held
        replica.num_open += 1

    async def connect(self) -> None:
        """Connect to the replica. BrokenError if it does not listen."""
        self.connection = await self.replica.take()

    def end(self) -> None:
        """The request has ended."""
        self.replica.num_open -= 1
        self.replica.give_back(self.connection)
        if self._held is not None:
            self._held.close()


class Router:
    """Places requests. It belongs to one event loop; `run` keeps its process and ports."""

    def __init__(self, table: ReplicaTable, spill: int) -> None:
        """A replica with `spill` requests more than the mean gets no request for its prefixes."""
        self._table = table
        self._spill = spill
        self._secret = secrets.token_urlsafe(32)
        self._port: int | None = None
        self._ports: list[int] = []

    @property
    def is_running(self) -> bool:
        """Whether smg answers. Without it, the replica with the fewest requests is chosen."""
        return self._port is not None

    async def place(self, text: str) -> PlacedRequest | None:
        """Return the replica for a prompt; None if no replica listens."""
        if self._port is not None and self._table.ready:
            with contextlib.suppress(TimeoutError, BrokenError, OSError, ValueError):
                async with asyncio.timeout(PLACE_S):
                    return await self._ask(self._port, text)
        return self.place_anywhere()

    def place_anywhere(self) -> PlacedRequest | None:
        """Return the replica with the fewest requests; None if no replica listens."""
        replica = self._table.least_open()
        return None if replica is None else PlacedRequest(replica, None)

    async def _ask(self, port: int, text: str) -> PlacedRequest:
        """Ask smg. BrokenError, OSError or ValueError for another answer than a number."""
        message = {"role": "user", "content": text[:MAX_TEXT]}
        body = {"model": MODEL, "stream": True, "messages": [message]}
        connection = await connect(HOST, port)
        try:
            _, _ = await connection.send(
                "POST", "/v1/chat/completions", self._headers, dumped(body)
            )
            return PlacedRequest(self._table[int(await connection.chunk())], connection)
        except BaseException:
            connection.close()
            raise

    @property
    def _headers(self) -> list[tuple[bytes, bytes]]:
        return [
            (b"host", HOST.encode()),
            (b"authorization", f"Bearer {self._secret}".encode()),
            (b"content-type", b"application/json"),
        ]

    async def run(self) -> None:
        """Keep the ports and smg until cancelled. When smg ends, it is started again."""
        with contextlib.ExitStack() as opened:
            sockets = [opened.enter_context(free_port()) for _ in self._table]
            self._ports = [one.getsockname()[1] for one in sockets]
            config = uvicorn.Config(
                self._answer,
                interface="asgi3",
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
            )
            server = uvicorn.Server(config)
            server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
            serving = asyncio.create_task(server.serve(sockets))
            try:
                while True:
                    await self._run_process()
                    log.warning("the router has ended; it is started again")
                    await asyncio.sleep(1.0)
            finally:
                server.should_exit = server.force_exit = True
                await serving

    async def _run_process(self) -> None:
        """Start smg, and wait for its end."""
        port, metrics_port = unused_port(), unused_port()
        process = subprocess.Popen(
            [sys.executable, "-m", "enginebay_server.replicas.router_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            options = {"port": port, "metrics_port": metrics_port, "secret": self._secret}
            assert process.stdin is not None
            process.stdin.write(
                dumped({**options, "spill": self._spill, "workers": self._ports}) + b"\n"
            )
            process.stdin.flush()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(START_S):
                    while not await is_answering(port) and process.poll() is None:
                        await asyncio.sleep(POLL_S)
                    self._port = port
            while process.poll() is None and self._port is not None:
                await asyncio.sleep(POLL_S)
        finally:
            self._port = None
            process.kill()  # it has nothing to finish
            wait_for_killed(process, "the router")
            if process.stdin is not None:
                process.stdin.close()

    async def _answer(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer smg as a server that has one model, and a placement with the replica's number."""
        if scope["type"] != "http":
            return
        number = self._ports.index(scope["server"][1])
        while (await receive()).get("more_body"):
            pass
        if scope["path"] == "/v1/chat/completions" and self._table[number].state == "ready":
            start = {"type": "http.response.start", "status": 200}
            await send({**start, "headers": [(b"content-type", b"text/event-stream")]})
            body = b"%d\n\n" % number
            await send({"type": "http.response.body", "body": body, "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        known = {"/health": {}, "/v1/models": MODELS}
        record = known.get(scope["path"])
        status = 503 if scope["path"] == "/v1/chat/completions" else 404 if record is None else 200
        start = {"type": "http.response.start", "status": status}
        await send({**start, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": dumped(record or {})})


MODELS = {
    "object": "list",
    "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "vllm"}],
}
"""smg recognises the kinds of servers that it knows by the owner of their models."""


def free_port() -> socket.socket:
    """Return a socket that is bound to a free port of this machine."""
    opened = socket.socket()
    opened.bind((HOST, 0))
    return opened


def unused_port() -> int:
    """Return a port that was free a moment ago."""
    with free_port() as opened:
        port: int = opened.getsockname()[1]
    return port


async def is_answering(port: int) -> bool:
    """Whether smg has found its workers."""
    try:
        connection = await connect(HOST, port)
    except OSError:
        return False
    try:
        status, _ = await connection.send("GET", "/readiness", [(b"host", HOST.encode())])
    except BrokenError:
        return False
    finally:
        connection.close()
    return status == 200


def dumped(record: object) -> bytes:
    """Return JSON for smg, whose parser refuses half of a UTF-16 pair."""
    return orjson.dumps(record)
