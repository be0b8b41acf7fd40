"""The parent's side of a worker process: it starts, asks, kills, replaces and closes it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Literal

from enginebay.worker.messages import SIZE_BYTES, frame

log = logging.getLogger("enginebay.worker")

START_LIMIT_S = 120.0
"""Time in which a worker must be ready, on a busy machine too."""

Limit = Literal["time", "memory", "stack", "depth"]
"""`stack` is a crash, `depth` Python's own limit on recursion."""


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What one request may use of a worker: seconds on the clock, and bytes beyond those of the
    idle process.
    """

    time_s: float
    memory_bytes: int
    stack_bytes: int


class LimitError(Exception):
    """A request exceeded a limit of its worker."""

    def __init__(self, limit: Limit) -> None:
        super().__init__(limit)
        self.limit = limit


class WorkerError(Exception):
    """A request whose answer is an exception, or a worker that cannot be started or died of
    something else.
    """


class StartError(WorkerError):
    """The worker could not be started."""


class KilledError(WorkerError):
    """The worker was killed by somebody else."""


class LimitedWorker:
    """A process that answers one request at a time, started by the first one. Safe from several
    threads.

    `target` names a factory as "module:name", which makes the function that answers from
    `settings`. Settings, requests and answers are values of JSON. A worker that exceeds a limit is
    killed, and the next request starts another.
    """

    def __init__(self, target: str, settings: Any, limits: WorkerLimits) -> None:
        self.limits = limits
        self._first = {"target": target, "settings": settings} | dataclasses.asdict(limits)
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._is_interrupted = False

    def ask(
        self,
        request: Any,
        *,
        default: Callable[[Any], Any] | None = None,
        time_s: float | None = None,
    ) -> Any:
        """The answer. LimitError for a request that exceeds a limit, WorkerError for one that
        cannot be answered.

        `time_s` shortens the limit of time for this request.

        `default` makes a value of JSON of one that is none; what json.dumps raises for others is
        raised here.
        """
        message = frame(request, default)
        limit_s = self.limits.time_s if time_s is None else min(time_s, self.limits.time_s)
        with self._lock:
            self._is_interrupted = False
            try:
                outcome = self._exchange(message, limit_s)
            except (
                BaseException
            ):  # interrupted ones too: the answer is still to come, so nobody else may ask
                self._end()
                raise
            if "exceeded" in outcome:  # memory may be short, and what holds it is unknown
                self._end()
                raise LimitError(outcome["exceeded"])
        if "raised" in outcome:
            raise WorkerError(outcome["raised"])
        return outcome["answer"]

    def _exchange(self, message: bytes, time_s: float) -> dict[str, Any]:
        """The outcome of a request. A worker that somebody else has killed since the last one is
        replaced once.
        """
        process = self._process
        if process is not None and process.is_alive:
            try:
                return process.exchange(message, time_s)
            except KilledError:
                if self._is_interrupted:
                    raise
        return self._replace().exchange(message, time_s)

    def start(self) -> None:
        """Start the process, so that the first request finds it. WorkerError when it cannot be
        started.
        """
        with self._lock:
            if self._process is None or not self._process.is_alive:
                self._replace()

    def close(self) -> None:
        """End the process. Closing twice is fine, and another request starts another process."""
        with self._lock:
            self._end()

    def interrupt(self) -> None:
        """Kill the process without waiting for a request that is under way in another thread, which
        raises WorkerError there.
        """
        process = self._process
        if process is not None:
            self._is_interrupted = True
            process.kill()

    @property
    def pid(self) -> int | None:
        """The id of the process, or None when there is none."""
        process = self._process
        return None if process is None else process.pid

    def _replace(self) -> _Process:
        self._end()
        self._process = process = _Process(self, self.limits.stack_bytes)
        try:
            outcome = process.exchange(frame(self._first), START_LIMIT_S)
        except BaseException as error:
            self._end()
            if isinstance(error, LimitError | WorkerError):
                raise StartError(str(error)) from None
            raise
        assert outcome == {"ready": True}, outcome
        return process

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


class _Process:
    """One process and its pipes. It ends with its owner, at the interpreter's exit too, and when
    its stdin does.
    """

    def __init__(self, owner: LimitedWorker, stack_bytes: int) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `_kill`
        path = os.pathsep.join(str(Path(place).absolute()) for place in sys.path)
        self._is_killed = False
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "enginebay.worker", str(stack_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=os.environ | {"PYTHONPATH": path},
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the parent
        )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._requests, self._answers = self._popen.stdin.fileno(), self._popen.stdout.fileno()
        os.set_blocking(self._requests, False)
        os.set_blocking(self._answers, False)
        self._end = weakref.finalize(owner, _kill, self._popen, self._said)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def is_alive(self) -> bool:
        return self._end.alive and self._popen.poll() is None

    def end(self) -> None:
        """Kill it, and close its pipes."""
        self._end()

    def kill(self) -> None:
        """Kill it, and leave its pipes to the thread that may be reading them."""
        self._is_killed = True
        _kill_group(self._popen)

    def exchange(self, message: bytes, time_s: float) -> dict[str, Any]:
        """The outcome of a request. LimitError and WorkerError leave the process to be ended."""
        deadline_s = time.monotonic() + time_s
        try:
            self._write(message, deadline_s)
            size = int.from_bytes(self._read(SIZE_BYTES, deadline_s), "big")
            outcome: dict[str, Any] = json.loads(self._read(size, deadline_s))
        except (EOFError, BrokenPipeError):
            raise self._death() from None
        return outcome

    def _write(self, message: bytes, deadline_s: float) -> None:
        left = memoryview(message)
        while left:
            _wait(self._requests, select.POLLOUT, deadline_s)
            with contextlib.suppress(BlockingIOError):
                left = left[os.write(self._requests, left) :]

    def _read(self, size: int, deadline_s: float) -> bytes:
        read = bytearray()
        while len(read) < size:
            _wait(self._answers, select.POLLIN, deadline_s)
            part = os.read(self._answers, size - len(read))
            if not part:
                raise EOFError
            read += part
        return bytes(read)

    def _death(self) -> LimitError | WorkerError:
        """Why it has gone."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=5)
        code = self._popen.returncode
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip()
        if code in (-signal.SIGSEGV, -signal.SIGBUS) or "stack overflow" in said:
            return LimitError("stack")
        if "memory allocation" in said or "MemoryError" in said:
            return LimitError("memory")
        if code == -signal.SIGXCPU:
            return LimitError("time")
        if self._is_killed:
            return KilledError("its worker process was ended")
        log.error("the worker process %d ended with code %s: %s", self.pid, code, said[-2000:])
        last = said.splitlines()[-1] if said else "it said nothing"
        kind = KilledError if code == -signal.SIGKILL else WorkerError
        return kind(f"its worker process ended with code {code}: {last[:200]}")


def _wait(pipe: int, event: int, deadline_s: float) -> None:
    """Until a pipe is ready or closed. LimitError at the deadline."""
    poll = select.poll()
    poll.register(pipe, event)
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise LimitError("time")
        if poll.poll(left_s * 1000):
            return


def _kill(popen: subprocess.Popen[bytes], said: IO[bytes]) -> None:
    """End a process with all that it started, and close its pipes."""
    _kill_group(popen)
    popen.wait()
    for pipe in (popen.stdin, popen.stdout, said):
        if pipe is not None:
            pipe.close()


def _kill_group(popen: subprocess.Popen[bytes]) -> None:
    if popen.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(popen.pid, signal.SIGKILL)
