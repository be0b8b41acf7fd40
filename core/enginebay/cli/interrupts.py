"""Ctrl-C: the first one ends a command in order, the second one ends the process at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 130
"""Exit code of a command that was ended by Ctrl-C."""


def _first(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


def go_on() -> None:
    """Reset after a command has handled a Ctrl-C and continues: the next Ctrl-C counts as the
    first.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # _first set it: a Ctrl-C was raised
        signal.signal(signal.SIGINT, _first)


@contextlib.contextmanager
def second_ends() -> Iterator[None]:
    """Within the block, the first Ctrl-C raises KeyboardInterrupt as usual. A second Ctrl-C, then
    or later, ends the process, unless go_on() was called in between.

    An interrupted command may wait for a program that is being compiled; a second Ctrl-C then ends
    it without a traceback. Nothing changes where another SIGINT handler is installed, or outside
    the main thread.
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
