"""compile_ahead: compiles several programs at a time, on a few threads."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Key = TypeVar("Key")

COMPILE_THREADS = 2


def compile_ahead(
    keys: Iterable[Key],
    lower: Callable[[Key], Any],
    compile_lowered: Callable[[Key, Any], Any],
    keep: Callable[[Key, Any], None],
) -> None:
    """Lower each key on this thread, compile it on one of COMPILE_THREADS threads, and call `keep`
    on this thread with the key and its program, in order.

    When any of the three functions raises, the programs that are being compiled finish first, and
    the others are not compiled.
    """

    def compiled(key: Key, lowered: Any) -> Any:
        program = compile_lowered(key, lowered)
        release_memory()
        return program

    pool = ThreadPoolExecutor(COMPILE_THREADS)
    running: collections.deque[tuple[Key, Future[Any]]] = collections.deque()
    try:
        for key in keys:
            running.append((key, pool.submit(compiled, key, lower(key))))
            # The next key is lowered only when a thread is free: a lowered program of unrolled
            # layers takes tens of MB until it is compiled.
            if len(running) >= COMPILE_THREADS:
                ready, program = running.popleft()
                keep(ready, program.result())
        for ready, program in running:
            keep(ready, program.result())
    finally:
        pool.shutdown(cancel_futures=True)
        release_memory()


def release_memory() -> None:
    """Return memory that the compiler has freed to the system; glibc would keep it, tens of MB per
    program.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # musl has no such function
            ctypes.CDLL(None).malloc_trim(0)
