"""How commands show waits (enginebay.waits): as plain lines on stderr, or with a handler."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from enginebay import waits


@contextmanager
def plain_waits(log_level: str) -> Iterator[None]:
    """Within the block, report waits as plain lines on stderr if `log_level` allows it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("enginebay: %(message)s"))
    handler.setLevel(log_level.upper())
    with shown_by(handler):
        yield


@contextmanager
def shown_by(handler: logging.Handler) -> Iterator[None]:
    """Within the block, show waits with this handler only."""
    log = waits.log
    before, log.handlers = log.handlers, [handler]
    propagates, log.propagate = log.propagate, False
    level = log.level
    log.setLevel(logging.INFO)  # bars need the records of ends, which have a lower level
    try:
        yield
    finally:
        log.handlers, log.propagate = before, propagates
        log.setLevel(level)
