"""compile_ahead: compiles several programs on a few threads, and ends early when its caller is
interrupted.
"""

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
    """Lower each key on this thread, compile it on one of two others, and call `keep` here with it
    and its program, in order.

    What any of the three functions raises ends it: programs that are being compiled end first,
    those that no thread has begun are left out.
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
            # None is lowered before a thread is free: a program of unrolled layers takes tens of
            # MB until it is compiled.
            if len(running) >= COMPILE_THREADS:
                ready, program = running.popleft()
                keep(ready, program.result())
        for ready, program in running:
            keep(ready, program.result())
    finally:
        pool.shutdown(cancel_futures=True)
        release_memory()


def release_memory() -> None:
    """Give the system back what the compiler has freed, which glibc keeps: tens of MB a program."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # musl has no such function
            ctypes.CDLL(None).malloc_trim(0)
