"""Ctrl-C: the first lets a command end in order, the second ends the process at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended."""


def _first(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


def go_on() -> None:
    """A command has answered a Ctrl-C and goes on: the next one is a first one again."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # _first set it: a Ctrl-C was raised
        signal.signal(signal.SIGINT, _first)


@contextlib.contextmanager
def second_ends() -> Iterator[None]:
    """Within the block the first Ctrl-C raises KeyboardInterrupt, as ever; a second one, then or
    later, ends the process, unless go_on() was called in between.

    So a command that was interrupted may wait for a program that is being compiled, and no second
    Ctrl-C becomes a traceback. Another handler, and a block on another thread than the main one,
    are left as they are.
    """
    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )

    if is_ours:
        signal.signal(signal.SIGINT, _first)
    try:
        yield
    finally:
        if is_ours and signal.getsignal(signal.SIGINT) is _first:
            signal.signal(signal.SIGINT, signal.default_int_handler)
