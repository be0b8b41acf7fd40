"""How the program shows waits (enginebay.waits): plain lines on stderr, or as a handler does."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from enginebay import waits


@contextmanager
def plain_waits(log_level: str) -> Iterator[None]:
    """While the block lasts, waits (enginebay.waits) are plain lines on stderr, from `log_level`
    on.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("enginebay: %(message)s"))
    handler.setLevel(log_level.upper())
    with shown_by(handler):
        yield


@contextmanager
def shown_by(handler: logging.Handler) -> Iterator[None]:
    """While the block lasts, a handler of its own shows the waits."""
    log = waits.log
    before, log.handlers = log.handlers, [handler]
    propagates, log.propagate = log.propagate, False
    level = log.level
    log.setLevel(
        logging.INFO
    )  # bars need the records of ends; the handler of lines has a level of its own
    try:
        yield
    finally:
        log.handlers, log.propagate = before, propagates
        log.setLevel(level)
