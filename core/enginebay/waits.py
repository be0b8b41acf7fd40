"""Logs long waits on the logger "enginebay.waits", so that users know what they wait for."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

log = logging.getLogger("enginebay.waits")

PATIENCE_S = 2.0
"""Seconds before the first record of a wait."""

REPEAT_S = 30.0
"""Seconds between further records of the same wait."""


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
