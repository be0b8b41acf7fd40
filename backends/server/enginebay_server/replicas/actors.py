"""Replicas as actors of Ray, which places them on machines and starts them again when they end.

Ray carries the start of a replica and nothing of a request.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from enginebay.errors import EnginebayError, InputError, UnsupportedError, error_line

if TYPE_CHECKING:
    from enginebay.config import EngineConfig
    from enginebay_server.serving import Chats
    from enginebay_server.settings import ServerSettings

log = logging.getLogger("enginebay.server")

STOP_S = 10.0
CONNECT_S = 10.0
STOPS = (signal.SIGTERM, signal.SIGINT)
OBJECT_STORE_BYTES = 80 * 2**20
"""Ray's smallest store; nothing is put into it."""


class ReplicaError(EnginebayError):
    """A replica that could not start."""

    exit_code = 2


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What every replica serves. `is_remote`: replicas may run on other machines than the front."""

    configs: Mapping[str, EngineConfig]
    settings: ServerSettings
    chats: Chats
    is_remote: bool = False


class ReplicaActor:
    """The process of one replica: a server on a thread of its own, at any free port."""

    def __init__(self, spec: ReplicaSpec) -> None:
        if os.environ.get("OMP_NUM_THREADS") == "1":  # Ray sets it for actors without processors
            del os.environ["OMP_NUM_THREADS"]
        self._listening: concurrent.futures.Future[tuple[str, int]] = concurrent.futures.Future()
        self._end: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, args=(spec,), daemon=True)
        self._thread.start()

    def address(self) -> tuple[tuple[str, int] | None, str]:
        """Wait until the server listens, and return (its address, ""); (None, the reason) if it
        cannot.
        """
        try:
            return self._listening.result(), ""
        except EnginebayError as error:
            return None, str(error)
        except BaseException as error:  # noqa: BLE001  # the caller is another process
            return None, error_line(error)

    def stop(self) -> None:
        """End the server and what it has started."""
        self._end()
        self._thread.join(STOP_S)

    def _run(self, spec: ReplicaSpec) -> None:
        from urllib.parse import urlsplit

        from enginebay_server.serving import Address, serve

        host = "127.0.0.1"
        if spec.is_remote:
            import ray

            host = ray.util.get_node_ip_address()

        def started(url: str, end: Callable[[], None]) -> None:
            self._end = end
            self._listening.set_result((host, urlsplit(url).port or 0))

        try:
            # The front keeps its connections for the next requests.
            address = Address(host, 0, keep_alive_s=3600)
            serve(spec.configs, address, spec.settings, spec.chats, started)
        except BaseException as error:  # noqa: BLE001  # address() reports it
            if not self._listening.done():
                self._listening.set_exception(error)


class Actors:
    """The replicas' actors, and Ray. Its methods may be called on any thread."""

    def __init__(
        self, count: int, spec: ReplicaSpec, ray_address: str | None, num_gpus: float | None
    ) -> None:
        """Start the actors, in the cluster at `ray_address` or in one of this process. `num_gpus`
        is the number for each replica, by default an equal share of the cluster's.
        """
        self._folder = None if ray_address else tempfile.mkdtemp(prefix="enginebay-")
        self._is_closed = False
        try:
            start_ray(ray_address, self._folder)
            import ray

            has = ray.cluster_resources().get("GPU", 0.0)
            gpus = has // count if num_gpus is None else num_gpus
            if gpus * count > has:
                raise InputError(
                    f"--replicas {count} with --replica-gpus {gpus:g}, of {has:g} GPUs",
                    "no more GPUs than there are",
                    "Pass smaller numbers.",
                )
            make = ray.remote(ReplicaActor).options(
                num_cpus=0,
                num_gpus=gpus,
                max_restarts=-1,
                scheduling_strategy="SPREAD",
            )
            self._actors = [make.remote(spec) for _ in range(count)]
        except BaseException:
            self._stop_ray()
            raise

    def address(self, number: int) -> tuple[str, int]:
        """Wait until a replica listens, and return its address. ReplicaError if it cannot start,
        and ConnectionError while Ray starts its process again.
        """
        import ray

        try:
            found, why = ray.get(self._actors[number].address.remote())
        except ray.exceptions.RayError as error:
            raise ConnectionError(error_line(error)) from None
        if found is None:
            raise ReplicaError(why)
        host, port = found
        return host, port

    def restart(self, number: int) -> None:
        """End the process of a replica; Ray starts another one."""
        import ray

        ray.kill(self._actors[number], no_restart=False)

    def close(self) -> None:
        """End all replicas and the processes of Ray. Another call does nothing."""
        import ray

        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(ray.exceptions.RayError):
            ray.wait(
                [one.stop.remote() for one in self._actors],
                timeout=STOP_S,
                num_returns=len(self._actors),
            )
        for actor in self._actors:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor)
        self._stop_ray()

    def _stop_ray(self) -> None:
        import ray

        ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def stops_blocked() -> Iterator[None]:
    """Block SIGTERM and SIGINT within the block. The processes that begin in it never see them: a
    supervisor may send the signals of a stop to every process of a service, and the front needs
    its helpers until its requests are answered.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_ray(address: str | None, folder: str | None) -> None:
    """Connect to the cluster at `address`, or start one whose ports need a secret token."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address is None:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        options |= {
            "include_dashboard": False,
            "_temp_dir": folder,
            "object_store_memory": OBJECT_STORE_BYTES,
        }
    try:
        if address is not None and "://" not in address:
            host, _, port = address.rpartition(":")
            if port.isdigit():  # Ray itself tries for minutes
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        import ray

        with stops_blocked():
            ray.init(address=address, **options)
    except Exception as error:  # noqa: BLE001  # Ray raises Exception itself, after 30 s
        raise UnsupportedError(
            f"Ray, which cannot be started: {error_line(error)}"
            if address is None
            else f"--ray-address {address}: {error_line(error)}",
            "a running cluster of Ray, as `ray start --head` makes one, or none",
            "Pass its address, or leave --ray-address out.",
        ) from None
