"""Service: the engine and its loop, which can be started, paused, resumed and stopped."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from enginebay.compose.composition import Composed
from enginebay.compose.override_block import overridden
from enginebay.contracts.engine import Engine, LaterCompilation
from enginebay.errors import EnginebayError
from enginebay.serving.loop import EngineLoop
from enginebay.serving.observer import Observers
from enginebay.serving.running import Running, TakeEvent
from enginebay.types import Request
from enginebay_esurge.errors import BusyError, NotRunningError


class Service:
    """Stopped, running or paused. Thread-safe; hold `lock` to keep a state for longer.

    The engine outlives its loops: programs and weights stay when the service is stopped.
    """

    def __init__(
        self, parts: Composed, compiling: LaterCompilation | None = None, *, drops_cache: bool
    ) -> None:
        """`compiling`: compilations that run in the background from the first start on."""
        self.parts = parts
        self._compiling = compiling
        self.lock = threading.RLock()
        self.audience = Observers()
        self._drops_cache = drops_cache
        self._loop: EngineLoop | None = None

    @property
    def is_running(self) -> bool:
        """Whether new requests are accepted."""
        return (loop := self._loop) is not None and not loop.is_paused

    @property
    def state(self) -> str:
        """The state: "running", "paused" or "stopped"."""
        return "running" if self.is_running else "stopped" if self._loop is None else "paused"

    @property
    def num_waiting(self) -> int:
        """Number of waiting completions."""
        return 0 if (loop := self._loop) is None else loop.num_waiting

    @property
    def num_running(self) -> int:
        """Number of completions with a row of the engine."""
        return 0 if (loop := self._loop) is None else loop.num_running

    @property
    def num_requests(self) -> tuple[int, int]:
        """(requests without a running completion, requests with a running completion)."""
        waiting, running = ((), ()) if (loop := self._loop) is None else loop.prompt_ids()
        return len(waiting), len(running)

    @property
    def adapters_in_use(self) -> Collection[str]:
        """Keys of the adapters that unfinished requests use. Read it on the engine's thread."""
        return () if (loop := self._loop) is None else loop.adapters_in_use

    def start(self) -> None:
        """Start, or resume, the service."""
        with self.lock:
            engine, loop = self.parts.engine, self._loop
            if loop is None:
                engine.make_arrays()
                parts = self.parts
                self._loop = EngineLoop(
                    engine, parts.scheduler, parts.plan.config, parts.proposer, self.audience
                )
            elif loop.is_paused:
                loop.call(lambda: _go_on(loop, engine))
            if self._compiling is not None:
                self._compiling.start()

    def pause(self) -> None:
        """Keep requests and run none. If the cache has no rows, its memory may be freed
        (`drops_cache`).
        """
        with self.lock:
            loop, engine, drops_cache = self._loop, self.parts.engine, self._drops_cache
            if loop is not None and not loop.is_paused:
                loop.call(lambda: _hold(loop, engine, drops_cache=drops_cache))

    def stop(self) -> None:
        """End the threads, and fail unfinished requests. A compilation that is running is
        completed.
        """
        with self.lock:
            loop, self._loop = self._loop, None
            if loop is not None:
                loop.close()
            if self._compiling is not None:
                self._compiling.stop()

    def end(self) -> None:
        """Stop, and write the cached pages to files, if the engine has such. `stop` does not, as it
        also runs when the interpreter ends, too late for threads.
        """
        with self.lock:
            self.stop()
            self.parts.engine.save_pages()

    def submit(self, requests: Sequence[Request], takes: Sequence[TakeEvent]) -> list[Running]:
        """Queue all requests or none; their events are passed to `takes`. NotRunningError unless
        running.
        """
        with self.lock:
            self.check_running()
            assert self._loop is not None, "a running service has a loop"
            return self._loop.submit(requests, takes)

    def check_running(self) -> None:
        """Raise NotRunningError unless running."""
        if not self.is_running:
            state = self.state
            todo = "initiate()" if state == "stopped" else "resume() or initiate()"
            raise NotRunningError(
                f"a request to a {state} engine", "a running engine", f"Call {todo} first."
            )

    def check_idle(self) -> None:
        """Raise BusyError when a completion waits or runs. The engine stays idle while `lock` is
        held.
        """
        num = self.call(lambda: self.num_waiting + self.num_running)
        if num:
            raise BusyError(
                f"new weights for an engine with {num} requests",
                "an idle engine",
                "Wait for the requests, or abort them.",
            )

    def abort(self, request_id: str) -> None:
        """Abort a completion with reason "abort". An unknown or finished one is ignored."""
        loop = self._loop
        if loop is not None:
            loop.abort(request_id)

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function between steps, and return its result."""
        with self.lock:
            return function() if self._loop is None else self._loop.call(function)

    def end_all(self, error: EnginebayError) -> None:
        """End every request with an error, between steps."""
        if self._loop is not None:
            self._loop.end_all(error)

    @contextlib.contextmanager
    def override(self, given: Mapping[str, Any], *, check: bool) -> Iterator[None]:
        """Run steps with other implementations while the block lasts, in any state; see
        `overridden`.
        """
        before = self.parts
        with overridden(before, self, given, check=check) as self.parts:
            try:
                yield
            finally:
                self.parts = before


# Called on the engine's thread.


def _hold(loop: EngineLoop, engine: Engine, *, drops_cache: bool) -> None:
    loop.is_paused = True
    if drops_cache and not engine.rows.num_reqs:
        engine.drop_arrays()


def _go_on(loop: EngineLoop, engine: Engine) -> None:
    engine.make_arrays()
    loop.is_paused = False
