"""Runs a server with replicas: Ray, the router and the front."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import signal
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

import orjson
import uvicorn

from enginebay.cli.interrupts import INTERRUPTED
from enginebay.config import EngineConfig
from enginebay_server.replicas.actors import Actors, ReplicaError, ReplicaSpec
from enginebay_server.replicas.adapters import AdapterName, SharedAdapters
from enginebay_server.replicas.exchange import BrokenError
from enginebay_server.replicas.proxy import ProxyState, proxy_app
from enginebay_server.replicas.router import Router
from enginebay_server.replicas.table import Replica, ReplicaTable
from enginebay_server.serving import Address, Chats, run_until_drained
from enginebay_server.settings import ServerSettings

log = logging.getLogger("enginebay.server")

POLL_S = 0.5
PROBE_S = 10.0
"""Max seconds that a replica has to answer a probe."""
AGAIN_S = 5.0
"""Seconds after which a replica that could not start is started again."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cluster:
    """The number of replicas, and where they run."""

    count: int
    ray_address: str | None = None
    """Address of a running cluster of Ray; None: replicas run on this machine."""
    num_gpus: float | None = None
    """GPUs of each replica; None: an equal share."""


def serve_replicas(
    configs: Mapping[str, EngineConfig],
    address: Address,
    settings: ServerSettings,
    chats: Chats,
    cluster: Cluster,
) -> int:
    """Start the replicas, and answer requests until SIGTERM or Ctrl-C. Returns the exit code, as
    `serve` does. ReplicaError if a replica cannot start.
    """
    address.check_tls()
    with contextlib.ExitStack() as opened:
        at = opened.enter_context(address.open())
        secret = secrets.token_urlsafe(32)
        store = settings.response_store
        if store is None:
            folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="enginebay-"))
            store = str(Path(folder) / "responses.sqlite")
        theirs = dataclasses.replace(
            settings,
            # Replicas know only whether clients need keys, which /openapi.json says.
            api_keys=settings.api_keys and (secret,),
            front_key=secret,
            cors_origins=(),
            response_store=store,
            response_journal="TRUNCATE" if cluster.ray_address else "WAL",
        )
        spec = ReplicaSpec(configs, theirs, chats, is_remote=cluster.ray_address is not None)
        actors = Actors(cluster.count, spec, cluster.ray_address, cluster.num_gpus)
        opened.callback(actors.close)
        table = ReplicaTable(cluster.count, secret)
        spill = max(config.max_num_seqs for config in configs.values()) // 4
        names = list(configs)
        state = ProxyState(settings, table, Router(table, max(1, spill)), names)
        if settings.lora_routes:
            state.adapters = SharedAdapters(table, names, adapters_at_start(configs))
        server = uvicorn.Server(address.config(proxy_app(state)))
        where = f"serving {', '.join(configs)} at {address.url(at)}/v1"
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            number = runner.run(run_proxy(server, at, state, actors, where))
    return INTERRUPTED if number == signal.SIGINT else 0


def adapters_at_start(configs: Mapping[str, EngineConfig]) -> dict[AdapterName, str]:
    """Return the folder of each adapter of the configurations."""
    return {
        (model, name): folder
        for model, config in configs.items()
        for name, folder in config.lora.items()
    }


async def run_proxy(
    server: uvicorn.Server, at: socket.socket, state: ProxyState, actors: Actors, where: str
) -> int | None:
    """Wait until all replicas listen, then answer requests. Returns the signal that ended the
    server. ReplicaError if a replica cannot start.
    """
    tasks: list[asyncio.Task[None]] = []
    try:
        for replica in state.table:
            replica.listens(await asyncio.to_thread(actors.address, replica.number))
        for one in state.table:
            tasks.append(asyncio.create_task(keep_running(one, actors, state.adapters)))
        tasks.append(asyncio.create_task(state.router.run()))
        tasks.append(asyncio.create_task(say_ready(state.table)))
        return await run_until_drained(server, at, state, where)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        state.lanes.close()
        actors.close()  # the loop waits for threads, and one may wait for a replica that hangs


async def say_ready(table: ReplicaTable) -> None:
    """Print when all replicas are ready for the first time."""
    while len(table.ready) < len(table):
        await asyncio.sleep(POLL_S)
    print(f"ready: {len(table)} replicas answer requests", flush=True)


async def keep_running(replica: Replica, actors: Actors, adapters: SharedAdapters | None) -> None:
    """Keep the state of a replica until cancelled. When its process ends, Ray starts another one,
    whose address is asked for. The new process gets the adapters of the others before it is ready.
    """
    while True:
        former = replica.address
        while replica.address is not None and await replica_answers(replica, actors, adapters):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(replica.lost.wait(), POLL_S)
        replica.lose()
        log.warning("replica %d does not answer; Ray starts it if it has ended", replica.number)
        if replica.is_failed:
            replica.is_failed = False
            await asyncio.to_thread(actors.restart, replica.number)
        while replica.address is None:
            try:
                address = await asyncio.to_thread(actors.address, replica.number)
                replica.num_restarts += address != former
                replica.listens(address)
            except ConnectionError:
                await asyncio.sleep(POLL_S)
            except ReplicaError as error:
                log.warning("replica %d cannot start: %s", replica.number, error)
                await asyncio.sleep(AGAIN_S)
                await asyncio.to_thread(actors.restart, replica.number)


async def replica_answers(
    replica: Replica, actors: Actors, adapters: SharedAdapters | None
) -> bool:
    """Update the state of a replica; returns whether its process runs. A process whose engine has
    stopped is ended.
    """
    try:
        async with asyncio.timeout(PROBE_S):
            status, body = await replica.get("/readiness")
            health, _ = await replica.get("/health")
    except BrokenError:
        return False
    except TimeoutError:
        replica.state = "compiling"
        return True
    replica.readiness = orjson.loads(body)
    is_ready = status == 200 and (adapters is None or await adapters.catch_up(replica))
    replica.state = "ready" if is_ready else "compiling"
    if health != 200:
        await asyncio.to_thread(actors.restart, replica.number)
        return False
    return True
