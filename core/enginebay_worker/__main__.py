"""The worker process: it answers requests from stdin on stdout, one at a time, within limits on
memory, stack and CPU time.

    python -m enginebay_worker

The first message names a factory as "module:name", its settings, and the limits. The factory makes
a function from the settings, and that function makes each answer from its request. A request of
plain bytes goes to its method `answer_bytes` instead, which answers with bytes. The process ends
with stdin. It may be killed at any time: only `enginebay_worker.process` talks to it, and JAX is
never imported here.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from enginebay_worker.messages import frame, frame_bytes, read_message

CPU_LIMIT_AGE_S = 0.5
"""Age at which the limit of CPU time is set anew: setting it costs more than a small request."""

MAX_LOG_BYTES = 1 << 20
"""Bytes that a worker may write to one file, hence to its stderr."""


def serve_jobs(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the requests end."""
    first = read_message(requests)
    module, _, name = first["target"].partition(":")
    answer = getattr(importlib.import_module(module), name)(first["settings"])
    _limit_memory(first["memory_bytes"])
    _send(answers, frame({"ready": True}))
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
    """A frame with the answer, the limit that was exceeded, or the exception that was raised."""
    try:
        if isinstance(request, bytes):
            return frame_bytes(answer.answer_bytes(request))  # type: ignore[attr-defined]
        return frame({"answer": answer(request)})
    except MemoryError:
        return frame({"exceeded": "memory"})
    except RecursionError:
        return frame({"exceeded": "depth"})
    except BaseException as error:  # noqa: BLE001  # whoever waits is answered
        return frame({"raised": f"{type(error).__name__}: {error}"})


def _send(answers: BinaryIO, framed: bytes) -> None:
    answers.write(framed)
    answers.flush()


def _limit_memory(allowed_bytes: int) -> None:
    """Memory of its own that the process may have beyond what it has now."""
    now_bytes = 0
    status = Path("/proc/self/status")
    if status.is_file():  # Linux; elsewhere the limit counts from nothing
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmData:"))
        now_bytes = int(line.split()[1]) << 10
    _limit(resource.RLIMIT_DATA, now_bytes + allowed_bytes)
    _limit(resource.RLIMIT_FSIZE, MAX_LOG_BYTES)
    _limit(resource.RLIMIT_CORE, 0)


def _limit_cpu(time_s: float) -> None:
    """The parent watches the clock. This ends a worker whose parent was killed while it waited."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + 2 * time_s) + 2)


def _limit(which: int, value: int) -> None:
    """Set a soft limit, within the hard one."""
    hard = resource.getrlimit(which)[1]
    with contextlib.suppress(ValueError, OSError):  # a system that does not have this limit
        resource.setrlimit(
            which, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard)
        )


def main(stack_bytes: int) -> None:
    """Serve in a thread with this stack. What others print goes to stderr, as stdout belongs to the
    answers.
    """
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    threading.stack_size(stack_bytes)
    thread = threading.Thread(target=serve_jobs, args=(requests, answers))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main(int(sys.argv[1]))
