"""The replicas of a server: where each listens, and whether it answers requests."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from enginebay_server.replicas.exchange import BrokenError, Connection, Headers, connect

ReplicaState = Literal["starting", "compiling", "ready"]
"""The process starts and has no address; it listens and refuses requests; it answers requests."""


@dataclasses.dataclass(slots=True)
class Replica:
    """One engine process. It belongs to one event loop."""

    number: int
    secret: str = dataclasses.field(repr=False)
    """The API key of the replica's own server."""
    address: tuple[str, int] | None = None
    state: ReplicaState = "starting"
    num_open: int = 0
    """Requests that this replica is answering."""
    num_restarts: int = 0
    readiness: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The latest record of /readiness."""
    adapted: tuple[str, int] | None = None
    """The address of the replica's process, once it has the adapters of the other replicas."""
    is_failed: bool = False
    """Whether the process has to be ended, because it may differ from the others."""
    lost: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set when a connection is refused, so that the address is asked for again at once."""
    _idle: list[Connection] = dataclasses.field(default_factory=list)

    def listens(self, address: tuple[str, int]) -> None:
        """Take the address of a process that has started."""
        self.address, self.state = address, "compiling"
        self.lost.clear()

    def lose(self) -> None:
        """Forget the address of a process that has ended."""
        self.address, self.state, self.readiness = None, "starting", {}
        while self._idle:
            self._idle.pop().close()
        self.lost.set()

    def fail(self) -> None:
        """Forget the address of a process that has to be ended."""
        self.is_failed = True
        self.lose()

    async def take(self) -> Connection:
        """Return a connection for one request; give it back after the answer. BrokenError if the
        replica does not listen.
        """
        while self._idle:
            connection = self._idle.pop()
            if connection.is_idle:
                return connection
        if self.address is None:
            raise BrokenError(f"replica {self.number} has not started")
        try:
            return await connect(*self.address)
        except OSError as error:
            self.lose()
            raise BrokenError(f"replica {self.number} does not listen: {error}") from None

    def give_back(self, connection: Connection) -> None:
        """Keep a connection for the next request, or close it if its answer is not complete."""
        if connection.is_idle and self.address is not None:
            self._idle.append(connection)
        else:
            connection.close()

    async def get(self, target: str) -> tuple[int, bytes]:
        """Return status and body of a GET. BrokenError without an answer."""
        status, _, body = await self._exchange("GET", target, ())
        return status, body

    async def post(self, target: str, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        """Return status, headers and body of a POST. BrokenError without an answer."""
        return await self._exchange("POST", target, headers, body)

    async def _exchange(
        self, method: str, target: str, headers: Headers, body: bytes = b""
    ) -> tuple[int, Headers, bytes]:
        connection = await self.take()
        try:
            status, given = await connection.send(method, target, [*self.headers(), *headers], body)
            return status, given, await connection.whole()
        finally:
            self.give_back(connection)

    def headers(self) -> Headers:
        """Return the headers that every request to this replica has."""
        host = "replica" if self.address is None else "{}:{}".format(*self.address)
        return [(b"host", host.encode()), (b"authorization", f"Bearer {self.secret}".encode())]


class ReplicaTable:
    """The replicas by number."""

    def __init__(self, count: int, secret: str) -> None:
        self._replicas = [Replica(number, secret) for number in range(count)]

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    def __len__(self) -> int:
        return len(self._replicas)

    def __getitem__(self, number: int) -> Replica:
        return self._replicas[number]

    @property
    def ready(self) -> Sequence[Replica]:
        """The replicas that answer requests."""
        return [replica for replica in self if replica.state == "ready"]

    @property
    def listening(self) -> Sequence[Replica]:
        """The replicas that have an address, ready or not."""
        return [replica for replica in self if replica.address is not None]

    def least_open(self) -> Replica | None:
        """Return the replica with the fewest open requests: a ready one, else one that listens;
        None if no replica listens.
        """
        return min(self.ready or self.listening, key=lambda one: one.num_open, default=None)
