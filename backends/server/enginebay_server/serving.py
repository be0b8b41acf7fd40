"""Runs the server: loads models, answers requests, drains, and ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Protocol

import uvicorn
from starlette.types import ASGIApp

from enginebay.cli.interrupts import INTERRUPTED
from enginebay.cli.program import one_line
from enginebay.cli.show import progress
from enginebay.config import EngineConfig
from enginebay.config_sections import AUTO
from enginebay.errors import InputError
from enginebay_server.heads import LimitedHeads
from enginebay_server.ingress import IngressState
from enginebay_server.response_store import open_store
from enginebay_server.settings import MAX_SECONDS, ServerSettings, ToolPrompt

if TYPE_CHECKING:
    from enginebay.serving import LLM
    from enginebay_server.served import ServedModel
    from enginebay_server.state import AppState

log = logging.getLogger("enginebay.server")

POLL_S = 0.05
GC_THRESHOLDS = 300_000, 10, 10
"""Arguments of gc.set_threshold: new objects, more than one body has, and collections of a younger
generation.
"""
END_S = 60.0
"""Seconds that the engines have to end after the last answer: a step or a compilation may run."""

FINAL_EVENT_TIMEOUT_S = 2.0
"""Seconds that requests have, after the drain timeout, to send their final error."""


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """The address of a server; with a certificate and its key it uses HTTPS."""

    host: str = "127.0.0.1"
    port: int = 8000
    tls_cert: str | None = None
    tls_key: str | None = None
    keep_alive_s: int = 60

    def __post_init__(self) -> None:
        """InputError for a port or a time outside its range."""
        if not 0 <= self.keep_alive_s <= MAX_SECONDS:
            raise InputError(
                f"--keep-alive {self.keep_alive_s}",
                f"0 to {MAX_SECONDS} seconds",
                "Pass --keep-alive 60, or 0 to close each connection after its answer.",
            )
        if not 0 <= self.port <= 65535:
            raise InputError(
                f"--port {self.port}",
                "0 to 65535",
                "Pass --port 8000, or --port 0 for any free port.",
            )

    def open(self) -> socket.socket:
        """Return a bound socket that does not listen yet; InputError if the address is in use."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            opened = socket.socket(found[0], socket.SOCK_STREAM)
        except OSError as error:
            raise self._wrong_host(error) from None
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind(found[4])
        except OSError as error:
            opened.close()
            if error.errno == errno.EADDRNOTAVAIL:
                raise self._wrong_host(error) from None
            raise InputError(
                f"--port {self.port} at {self.host}, which cannot be opened ({error.strerror})",
                "a port that is free, or 0 for any that is",
                "Pass another --port, or end what uses it.",
            ) from None
        return opened

    def _wrong_host(self, error: OSError) -> InputError:
        return InputError(
            f"--host {self.host or repr('')}: {error.strerror}",
            "an address of this machine",
            "Pass --host 127.0.0.1, or --host 0.0.0.0 for all addresses.",
        )

    def check_tls(self) -> None:
        """Raise InputError unless both files are missing, or both are given and match."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InputError("one of --tls-cert and --tls-key", "both or neither", "Pass both.")
        if self.tls_cert is None:
            return
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                self.tls_cert, self.tls_key, password=self._refuse_password
            )
        except (OSError, ssl.SSLError) as error:
            raise InputError(
                f"--tls-cert {self.tls_cert} with --tls-key {self.tls_key}: {error}",
                "a certificate chain and its private key in PEM",
                "Pass two files that belong together.",
            ) from None

    def _refuse_password(self) -> str:
        raise InputError(
            f"--tls-key {self.tls_key}, which is encrypted",
            "a private key without a password",
            "Decrypt it: openssl pkey -in KEY -out NEW.",
        )

    def config(self, app: ASGIApp, log_level: str | None = None) -> uvicorn.Config:
        """Return the settings of a uvicorn server for an application at this address."""
        return uvicorn.Config(
            app,
            log_config=None,
            log_level=log_level,
            access_log=False,
            lifespan="off",
            ws="none",
            http=LimitedHeads,
            timeout_keep_alive=self.keep_alive_s,
            timeout_graceful_shutdown=int(FINAL_EVENT_TIMEOUT_S),
            ssl_certfile=self.tls_cert,
            ssl_keyfile=self.tls_key,
            server_header=False,
        )

    def url(self, opened: socket.socket) -> str:
        """Return the URL of the socket for clients."""
        host, port = opened.getsockname()[:2]
        scheme = "https" if self.tls_cert else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


@dataclasses.dataclass(frozen=True, slots=True)
class Chats:
    """The chat template that replaces those of the models, and the parsers of answers by name."""

    template: str | None = None
    tool_parser: str = AUTO
    reasoning_parser: str = AUTO
    tool_prompt: ToolPrompt = "auto"


class Draining(IngressState, Protocol):
    """The state of an application that can drain."""

    async def end_all(self) -> None:
        """End the accepted requests with an error for their clients."""


Started = Callable[[str, Callable[[], None]], None]
"""Called with the URL of a server that listens, and a function that makes it drain and end. The
function may be called on any thread.
"""


def serve(
    configs: Mapping[str, EngineConfig],
    address: Address,
    settings: ServerSettings,
    chats: Chats | None = None,
    started: Started | None = None,
) -> int:
    """Load the models, and answer requests until SIGTERM or Ctrl-C. Returns the exit code: 0 after
    SIGTERM, 130 after Ctrl-C.

    `configs` has the names for clients. The address and the store of responses are opened before a
    model is loaded, so that a wrong one fails at once.
    """
    before = threading.enumerate()
    address.check_tls()
    open_store(settings).close()
    with contextlib.ExitStack() as opened:
        at = opened.enter_context(address.open())
        names = one_line(", ".join(dict.fromkeys(config.model for config in configs.values())))
        print(f"enginebay: loading {names} ...", file=sys.stderr, flush=True)
        # JAX and FastAPI take a second to import: an error, and the line above, need not wait.
        from enginebay_server.app import create_app
        from enginebay_server.served import ServedModel

        chats = chats or Chats()
        models = [
            ServedModel(
                name,
                opened.enter_context(load_model(config)),
                chat_template=chats.template,
                tool_parser=chats.tool_parser,
                reasoning_parser=chats.reasoning_parser,
                tool_prompt=chats.tool_prompt,
            )
            for name, config in configs.items()
        ]
        app = create_app(models, settings)
        state: AppState = app.state.server
        opened.callback(state.close)
        server = uvicorn.Server(address.config(app))
        thread = start_warmup(models, settings)
        url = address.url(at)
        where = f"serving {', '.join(configs)} at {url}/v1"
        announce = started and functools.partial(started, url)
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            number = runner.run(run_until_drained(server, at, state, where, announce))
            code = INTERRUPTED if number == signal.SIGINT else 0
            all_ended = end_in_time(code, before)
        for model in models:
            model.llm.close()  # which also ends a compilation
        thread.join()
    all_ended()
    return code


def end_in_time(code: int, before: Collection[threading.Thread]) -> Callable[[], None]:
    """End the process with the exit code `code` after END_S seconds: a thread that hangs must not
    keep it. The returned function, called when everything is closed, calls that off, unless a
    thread is left for which Python would wait. `before`: threads that are not the server's.
    """
    ended = threading.Event()

    def watch() -> None:
        if ended.wait(END_S):
            return
        left = ", ".join(sorted(one.name for one in threading.enumerate() if one not in before))
        log.error("the server has not ended after %g s; it ends with its threads %s", END_S, left)
        logging.shutdown()
        os._exit(code)

    def call_off() -> None:
        if all(one.daemon or one in before for one in threading.enumerate()):
            ended.set()

    threading.Thread(target=watch, name="enginebay-end", daemon=True).start()
    return call_off


def load_model(config: EngineConfig) -> LLM:
    """Load one model, and show the progress."""
    from enginebay.serving import LLM

    with progress() as report:
        return LLM(config=config, progress=report)


def freeze_heap() -> None:
    """Leave the objects of this process, which live as long as it does, out of every later garbage
    collection, and collect seldom. Each collection stops all threads: with these objects for most
    of a second, and reading one large body would begin many.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def start_warmup(models: Sequence[ServedModel], settings: ServerSettings) -> threading.Thread:
    """Compile the programs of all models, one model after the other, on a new thread."""
    background = settings.warmup == "background"

    def compile_each() -> None:
        for model in models:
            model.compile_all(background=background)
        freeze_heap()
        is_ready = all(model.is_ready for model in models)
        if background and is_ready:
            print("ready: requests are answered while the other programs are compiled", flush=True)
            for model in models:
                model.finish()
            freeze_heap()
            is_ready = not any(model.is_compiling for model in models)
        if is_ready:
            print("ready: every program is compiled", flush=True)

    freeze_heap()
    if settings.warmup == "lazy":
        for model in models:
            model.warmup = "lazy"
    thread = threading.Thread(
        target=compile_each if settings.warmup != "lazy" else lambda: None,
        name="enginebay-warmup",
        daemon=True,
    )
    thread.start()
    return thread


async def run_until_drained(
    server: uvicorn.Server,
    at: socket.socket,
    state: Draining,
    where: str,
    announce: Callable[[Callable[[], None]], None] | None = None,
) -> int | None:
    """Answer requests until the first SIGTERM or Ctrl-C, then finish the accepted ones. Returns the
    signal's number; None if `server` was ended without a signal.

    A second signal ends the accepted requests too. `where` is printed when the server listens.
    Then `announce` is called with a function that does what SIGTERM does.
    """
    loop = asyncio.get_running_loop()
    ending: asyncio.Future[int] = loop.create_future()

    def end() -> None:
        loop.call_soon_threadsafe(set_ending, ending, signal.SIGTERM)

    with handling(loop, server, ending):
        serving = asyncio.create_task(server.serve(sockets=[at]))
        draining = asyncio.create_task(drain(server, state, ending))
        while not server.started and not serving.done():
            await asyncio.sleep(POLL_S)
        print(where, flush=True)
        if announce is not None:
            announce(end)
        try:
            await serving
        finally:
            draining.cancel()
    return ending.result() if ending.done() else None


def set_ending(ending: asyncio.Future[int], number: int) -> None:
    """Set the result of a future, unless it has one."""
    if not ending.done():
        ending.set_result(number)


@contextlib.contextmanager
def handling(
    loop: asyncio.AbstractEventLoop, server: uvicorn.Server, ending: asyncio.Future[int]
) -> Iterator[None]:
    """Within the block the first signal's number becomes the result of `ending`; uvicorn asks for
    its handler when it starts. Threads other than the main one get no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, _: FrameType | None) -> None:
        if ending.done():
            server.should_exit = server.force_exit = True
        loop.call_soon_threadsafe(set_ending, ending, number)

    server.handle_exit = on_signal  # type: ignore[method-assign,assignment]
    before = {one: signal.signal(one, on_signal) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


async def drain(server: uvicorn.Server, state: Draining, ending: asyncio.Future[int]) -> None:
    """Wait for `ending`, then refuse new requests and wait for the accepted ones.

    Requests that take longer than the drain timeout end with an error for their clients.
    """
    await asyncio.wait([ending])
    state.is_draining = True
    log.warning("ending: %d requests are under way", state.num_open)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(state.settings.drain_timeout_s):
            while state.num_open:
                await asyncio.sleep(POLL_S)
    if state.num_open:
        log.warning("the drain timeout ends %d requests", state.num_open)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await state.end_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINAL_EVENT_TIMEOUT_S):
                while state.num_open:
                    await asyncio.sleep(POLL_S)
    server.should_exit = True
