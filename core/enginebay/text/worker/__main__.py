"""The worker process: it answers requests from stdin on stdout, one at a time, within limits on
memory, stack and CPU time.

    python -m enginebay.text.worker

The first message names a factory as "module:name", its settings, and the limits. The factory makes
a function from the settings, and this function answers each request. A request of plain bytes goes
to its method `answer_bytes`, which returns bytes. The process ends with stdin. It may be killed at
any time. Only `enginebay.text.worker.process` talks to it. Only a factory may import JAX.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from enginebay.errors import UnsupportedError
from enginebay.text.worker.messages import frame, frame_bytes, read_message

CPU_LIMIT_AGE_S = 0.5
"""Age after which the CPU limit is set again: setting it costs more than a small request."""

MAX_LOG_BYTES = 1 << 20
"""Max bytes that a worker may write to one file, including stderr."""


def serve_jobs(requests: BinaryIO, answers: BinaryIO, *, goes_on: bool) -> None:
    """Answer the requests of a stream, one at a time, until the stream ends. `goes_on`: whether the
    process may be stopped, because it goes on when the stream ends.
    """
    first = read_message(requests)
    module, _, name = first["target"].partition(":")
    try:
        answer = getattr(importlib.import_module(module), name)(first["settings"])
    except UnsupportedError as error:
        _send(answers, frame({"unsupported": str(error)}))
        return
    if first["memory_bytes"] is not None:
        _limit_memory(first["memory_bytes"])
    _send(answers, frame({"ready": True, "goes_on": goes_on}))
    limited_s = -CPU_LIMIT_AGE_S
    with contextlib.suppress(EOFError):
        while True:
            request = read_message(requests)
            now_s = time.monotonic()
            if now_s - limited_s >= CPU_LIMIT_AGE_S:
                _limit_cpu(first["time_s"])
                limited_s = now_s
            _send(answers, _outcome(answer, request))


def _outcome(answer: Callable[[Any], Any], request: Any) -> bytes:
    """Return a frame with the answer, the exceeded limit, or the raised exception."""
    try:
        if isinstance(request, bytes):
            return frame_bytes(answer.answer_bytes(request))  # type: ignore[attr-defined]
        return frame({"answer": answer(request)})
    except MemoryError:
        return frame({"exceeded": "memory"})
    except RecursionError:
        return frame({"exceeded": "depth"})
    except BaseException as error:  # noqa: BLE001  # the parent waits for an answer
        return frame({"raised": f"{type(error).__name__}: {error}"})


def _send(answers: BinaryIO, framed: bytes) -> None:
    answers.write(framed)
    answers.flush()


def _limit_memory(allowed_bytes: int) -> None:
    """Limit the memory that the process may use in addition to its current memory."""
    now_bytes = 0
    status = Path("/proc/self/status")
    if status.is_file():  # Linux; elsewhere the limit counts from 0
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmData:"))
        now_bytes = int(line.split()[1]) << 10
    _limit(resource.RLIMIT_DATA, now_bytes + allowed_bytes)
    _limit(resource.RLIMIT_FSIZE, MAX_LOG_BYTES)
    _limit(resource.RLIMIT_CORE, 0)


def _limit_cpu(time_s: float) -> None:
    """Limit CPU time. The parent enforces the time limit; this ends a worker whose parent was
    killed.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + 2 * time_s) + 2)


def _limit(which: int, value: int) -> None:
    """Set a soft limit, at most the hard limit."""
    hard = resource.getrlimit(which)[1]
    with contextlib.suppress(ValueError, OSError):  # the system does not support this limit
        resource.setrlimit(
            which, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard)
        )


def _goes_on_with_pipe(pipe: int) -> bool:
    """Let the system continue this process, if it is stopped, when the other side of a pipe is
    written to or closed. Return whether it does; only Linux can.
    """
    if not hasattr(fcntl, "F_SETSIG"):
        return False
    try:
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGCONT)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:  # a sandbox may refuse it
        return False
    return True


def main(stack_bytes: int) -> None:
    """Serve in a thread with this stack size, and end with the parent, however it ends. Other
    output goes to stderr, because stdout carries the answers.

    A supervisor may send the signals of a stop to every process of a service. The parent then still
    answers what it has accepted, and needs its workers.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    goes_on = _goes_on_with_pipe(requests.fileno())
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    threading.stack_size(stack_bytes)
    ended, is_working = os.pipe()

    def serve() -> None:
        try:
            serve_jobs(requests, answers, goes_on=goes_on)
        finally:
            os.close(is_working)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    ends = select.poll()
    for pipe in (requests.fileno(), ended):
        ends.register(pipe, 0)  # no data, only that its other side was closed
    if ended not in dict(ends.poll()):
        os._exit(0)  # the parent has ended, and the thread may be within a library for long
    thread.join()


if __name__ == "__main__":
    main(int(sys.argv[1]))
