"""Waits: whatever may take more than two seconds says on the logger "enginebay.waits" what
it does.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

log = logging.getLogger("enginebay.waits")

PATIENCE_S = 2.0
"""Seconds that something may take without a word."""

REPEAT_S = 30.0
"""Seconds after which a wait that goes on is named again."""


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Name `what` ("compiling ...") on the logger when the block takes longer than PATIENCE_S, and
    again every REPEAT_S.

    The records are warnings, which Python writes to stderr even where a program has configured no
    logging; the record of the end is of level INFO, and only where the beginning was named. A
    program that shows waits itself adds a handler to the logger: every record has `wait_key`, the
    same for one wait, and `wait_ended`.
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
