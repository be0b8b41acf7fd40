"""The parent's side of a worker process: starts, asks, kills, replaces and closes it."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import math
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

from enginebay.errors import UnsupportedError
from enginebay.text.worker.messages import IS_BYTES, SIZE_BYTES, frame, frame_bytes
from enginebay.waits import wait_for_killed

log = logging.getLogger("enginebay.worker")

START_LIMIT_S = 120.0
"""Max seconds in which a worker must be ready, on a busy machine too."""

PIPE_BYTES = 1 << 20
"""Size of the pipe for answers; the masks of one step fit into it."""

OUTSIDE_SIGNALS = {
    -number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
}
"""Exit codes of a process that was killed from outside."""

Limit = Literal["time", "memory", "stack", "depth"]
"""`stack` means a crash, `depth` means Python's own recursion limit."""


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerLimits:
    """The limits of one request: seconds of wall time, and bytes in addition to those of the idle
    process. Without `memory_bytes` there is no limit on memory or on files.
    """

    time_s: float
    memory_bytes: int | None
    stack_bytes: int


class LimitError(Exception):
    """A request exceeded a limit of its worker."""

    def __init__(self, limit: Limit) -> None:
        super().__init__(limit)
        self.limit = limit


class WorkerError(Exception):
    """A request whose answer is an exception, or a worker that could not start or died for another
    reason than a limit.
    """


class StartError(WorkerError):
    """The worker could not be started."""


class KilledError(WorkerError):
    """The worker was killed from outside."""


class LimitedWorker:
    """A process that answers one request at a time; the first request starts it. Thread-safe.

    `target` names a factory as "module:name"; it makes the answering function from `settings`.
    Settings, requests and answers are JSON values. A worker that exceeds a limit is killed, and the
    next request starts another one. An UnsupportedError of the factory is raised by the request
    that starts the worker.

    `post`, `has_answer` and `take` are the parts of `ask`, for plain bytes and one thread: between
    `post` and `take`, `ask` may not be called.
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
        """Return the answer to a request. LimitError for a request that exceeds a limit,
        WorkerError for one that cannot be answered.

        `time_s` shortens the time limit of this request.

        `default` converts values that are not JSON; other exceptions of json.dumps are passed on.
        """
        message = frame(request, default)
        limit_s = self.limits.time_s if time_s is None else min(time_s, self.limits.time_s)
        with self._lock:
            self._is_interrupted = False
            try:
                outcome = self._exchange(message, limit_s)
            except (
                BaseException
            ):  # also after an interrupt: the old answer may still arrive, so replace the process
                self._end()
                raise
            if "exceeded" in outcome:  # the process may still hold too much memory
                self._end()
                raise LimitError(outcome["exceeded"])
        if "raised" in outcome:
            raise WorkerError(outcome["raised"])
        return outcome["answer"]

    def post(self, content: bytes, time_s: float) -> bool:
        """Send bytes without waiting for the answer. Return False when no process can take them."""
        process = self._process
        if process is None:
            return False
        self._is_interrupted = False
        try:
            process.send(frame_bytes(content), time_s)
        except (OSError, LimitError):
            return False  # the process has ended, or does not read
        return True

    def has_answer(self, wait_s: float) -> bool:
        """Return whether the answer to `post` has arrived, after at most `wait_s` seconds."""
        return self._process is not None and self._process.has_answer(wait_s)

    def take(self) -> memoryview:
        """Return the bytes that answer `post`, once they have arrived. LimitError and WorkerError
        as in `ask`.
        """
        with self._lock:
            if self._process is None:
                raise KilledError("its worker process was killed")
            try:
                outcome = self._process.receive()
                if "exceeded" in outcome:
                    raise LimitError(outcome["exceeded"])
            except BaseException:
                self._end()
                raise
        if "raised" in outcome:
            raise WorkerError(outcome["raised"])
        answer: memoryview = outcome["answer"]
        return answer

    def _exchange(self, message: bytes, time_s: float) -> dict[str, Any]:
        """Return the outcome of a request. A worker that was killed from outside since the last
        request is replaced once.
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
        """Start the process, so that the first request need not wait for it. WorkerError when it
        cannot start.
        """
        with self._lock:
            if self.pid is None:
                self._replace()

    def close(self) -> None:
        """End the process. May be called twice; the next request starts another process."""
        with self._lock:
            self._end()

    def interrupt(self) -> None:
        """Kill the process without waiting for a request of another thread, which then raises
        WorkerError.
        """
        process = self._process
        if process is not None:
            self._is_interrupted = True
            process.kill()

    def pause(self, *, is_paused: bool = True) -> None:
        """Stop the process where it is, or let it go on. It also goes on for a request, and at the
        end of this process. Does nothing where the system cannot do that.
        """
        process = self._process
        if process is not None and process.goes_on:
            process.signal(signal.SIGSTOP if is_paused else signal.SIGCONT)

    @property
    def pid(self) -> int | None:
        """Return the id of the process, or None when none runs."""
        process = self._process
        return process.pid if process is not None and process.is_alive else None

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
        if "unsupported" in outcome:
            self._end()
            raise UnsupportedError(outcome["unsupported"])
        assert outcome["ready"], outcome
        process.goes_on = outcome["goes_on"]
        return process

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


class _Process:
    """One process and its pipes. It ends with its owner, at the interpreter's exit, and when its
    stdin closes.
    """

    def __init__(self, owner: LimitedWorker, stack_bytes: int) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `_kill`
        path = os.pathsep.join(str(Path(place).absolute()) for place in sys.path)
        self._is_killed = False
        self.goes_on = False
        """Whether it goes on after a stop when this process ends."""
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "enginebay.text.worker", str(stack_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=os.environ | {"PYTHONPATH": path},
            bufsize=0,
            start_new_session=True,  # Ctrl-C goes to the parent only
        )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._requests, self._answers = self._popen.stdin.fileno(), self._popen.stdout.fileno()
        for pipe in (self._requests, self._answers):
            os.set_blocking(pipe, False)
        with contextlib.suppress(
            AttributeError, OSError
        ):  # only Linux can resize pipes, up to a limit
            fcntl.fcntl(self._answers, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._answers_poll = select.poll()
        self._answers_poll.register(self._answers, select.POLLIN)
        self._answer = bytearray()
        self._deadline_s = math.inf
        self._end = weakref.finalize(owner, _kill, self._popen, self._said)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def is_alive(self) -> bool:
        return self._end.alive and not self._is_killed and self._popen.poll() is None

    def end(self) -> None:
        """Kill the process and close its pipes."""
        self._end()

    def kill(self) -> None:
        """Kill the process; the thread that may be reading its pipes closes them."""
        self._is_killed = True
        _signal_group(self._popen, signal.SIGKILL)

    def signal(self, number: int) -> None:
        _signal_group(self._popen, number)

    def exchange(self, message: bytes, time_s: float) -> dict[str, Any]:
        """Return the outcome of a request. After LimitError and WorkerError, the caller must end
        the process.
        """
        try:
            self.send(message, time_s)
        except BrokenPipeError:
            raise self._death() from None
        return self.receive()

    def send(self, message: bytes, time_s: float) -> None:
        """Start an exchange that must end within `time_s` seconds."""
        self._deadline_s = time.monotonic() + time_s
        self._answer = bytearray()
        left = memoryview(message)
        while left:
            with contextlib.suppress(BlockingIOError):
                left = left[os.write(self._requests, left) :]
            if left:
                _wait(self._requests, select.POLLOUT, self._deadline_s)

    def has_answer(self, wait_s: float) -> bool:
        """Return whether the whole outcome has arrived, after at most `wait_s` seconds. False for a
        process that has ended without an outcome.
        """
        try:
            self._read(min(time.monotonic() + wait_s, self._deadline_s))
        except (LimitError, EOFError):
            return False
        return True

    def receive(self) -> dict[str, Any]:
        """Return the outcome of the request that was sent; wait until the deadline."""
        try:
            size = self._read(self._deadline_s)
        except EOFError:
            raise self._death() from None
        content, self._answer = memoryview(self._answer)[SIZE_BYTES:].toreadonly(), bytearray()
        outcome: dict[str, Any] = (
            {"answer": content} if size & IS_BYTES else json.loads(bytes(content))
        )
        return outcome

    def _read(self, deadline_s: float) -> int:
        """Return the marked length of an outcome that has arrived completely. LimitError at the
        deadline.
        """
        while True:
            if len(self._answer) >= SIZE_BYTES:
                size = int.from_bytes(self._answer[:SIZE_BYTES], "big")
                if len(self._answer) - SIZE_BYTES >= size & ~IS_BYTES:
                    return size
            _wait(self._answers, select.POLLIN, deadline_s, self._answers_poll)
            part = os.read(self._answers, PIPE_BYTES)
            if not part:
                raise EOFError
            self._answer += part

    def _death(self) -> LimitError | WorkerError:
        """Return the reason why the process has ended."""
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
            return KilledError("its worker process was killed")
        log.error("the worker process %d ended with code %s: %s", self.pid, code, said[-2000:])
        last = said.splitlines()[-1] if said else "no output"
        kind = KilledError if code in OUTSIDE_SIGNALS else WorkerError
        return kind(f"its worker process ended with code {code}: {last[:200]}")


def _wait(pipe: int, event: int, deadline_s: float, poll: select.poll | None = None) -> None:
    """Wait until a pipe is ready or closed. LimitError if it is not ready at the deadline.

    `poll` already has the pipe registered.
    """
    if poll is None:
        poll = select.poll()
        poll.register(pipe, event)
    while True:
        left_s = deadline_s - time.monotonic()
        if poll.poll(max(0.0, left_s * 1000)):
            return
        if left_s <= 0:
            raise LimitError("time")


def _kill(popen: subprocess.Popen[bytes], said: IO[bytes]) -> None:
    """Kill a process and all its children, and close its pipes."""
    _signal_group(popen, signal.SIGKILL)
    wait_for_killed(popen, "a worker")
    for pipe in (popen.stdin, popen.stdout, said):
        if pipe is not None:
            pipe.close()


def _signal_group(popen: subprocess.Popen[bytes], number: int) -> None:
    if popen.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(popen.pid, number)
