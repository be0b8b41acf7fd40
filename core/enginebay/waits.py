"""Logs long waits on the logger "enginebay.waits", so that users know what they wait for."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

log = logging.getLogger("enginebay.waits")

PATIENCE_S = 2.0
"""Seconds before the first record of a wait."""

REPEAT_S = 30.0
"""Seconds between further records of the same wait."""

END_S = 120.0
"""Seconds that a thread has to end when what it belongs to is closed: a step or a compilation may
run.
"""

INTERRUPT_EVERY_S = 0.2
"""How often has_ended() interrupts."""


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Log `what` ("compiling ...") when the block takes longer than PATIENCE_S, and again every
    REPEAT_S.

    These records are warnings, which Python prints to stderr even in a program that configures no
    logging. A wait that was logged ends with a record of level INFO. A program that shows waits
    itself adds a handler to the logger: every record has `wait_key`, which is the same for all
    records of one wait, and `wait_ended`.
    """
    start, ended = time.monotonic(), threading.Event()
    key = object()
    named = threading.Event()

    def watch() -> None:
        pause_s = PATIENCE_S
        while not ended.wait(pause_s):
            passed = f" ({time.monotonic() - start:.0f} s so far)" if named.is_set() else ""
            named.set()
            log.warning("%s ...%s", what, passed, extra={"wait_key": key, "wait_ended": False})
            pause_s = REPEAT_S

    thread = threading.Thread(target=watch, name="enginebay-wait", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if named.is_set():
            passed_s = time.monotonic() - start
            log.info("%s took %.1f s", what, passed_s, extra={"wait_key": key, "wait_ended": True})


def has_ended(thread: threading.Thread, interrupt: Callable[[], object] | None = None) -> bool:
    """Wait until a thread has ended, at most END_S, and return whether it has. Warnings name a
    thread that is waited for and one that is left behind: nobody who closes something hangs with
    a thread that hangs. `interrupt` is called again and again meanwhile.
    """
    start, key, is_named = time.monotonic(), object(), False
    what = f"waiting for the thread {thread.name} to end"
    while thread.is_alive() and (passed_s := time.monotonic() - start) < END_S:
        if passed_s > PATIENCE_S and not is_named:
            is_named = True
            log.warning("%s ...", what, extra={"wait_key": key, "wait_ended": False})
        if interrupt is not None:
            interrupt()
        thread.join(min(INTERRUPT_EVERY_S, END_S))
    extra = {"wait_key": key, "wait_ended": True}
    if thread.is_alive():
        log.warning("the thread %s has not ended after %g s", thread.name, END_S, extra=extra)
    elif is_named:
        log.info("%s took %.1f s", what, time.monotonic() - start, extra=extra)
    return not thread.is_alive()


def shut_down(pool: ThreadPoolExecutor, name: str) -> bool:
    """Shut down a pool of one thread after the calls that it was given, as has_ended() does."""
    try:
        last = pool.submit(int)
    except RuntimeError:  # it was shut down before, or Python is ending and has waited for it
        return True
    pool.shutdown(wait=False)
    has_finished = not wait([last], END_S).not_done
    if not has_finished:
        extra = {"wait_key": pool, "wait_ended": True}
        log.warning("the thread %s has not ended after %g s", name, END_S, extra=extra)
    return has_finished


def wait_for_killed(process: subprocess.Popen[Any], name: str) -> bool:
    """Wait until a process that was killed has ended, at most END_S, and return whether it has. An
    error names one that has not: the kernel holds it, it ends later, and nobody waits for it.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    if process.returncode is None:
        log.error("the process %d of %s has not ended after %g s", process.pid, name, END_S)
    return process.returncode is not None
