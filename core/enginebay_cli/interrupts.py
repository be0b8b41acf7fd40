"""Ctrl-C: the first lets a command end in order, the second ends the process at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended."""


@contextlib.contextmanager
def second_ends() -> Iterator[None]:
    """Within the block the first Ctrl-C raises KeyboardInterrupt, as ever; a second one, then or
    later, ends the process.

    So a command that was interrupted may wait for a program that is being compiled, and no second
    Ctrl-C becomes a traceback. Another handler, and a block on another thread than the main one,
    are left as they are.
    """
    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )

    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt

    if is_ours:
        signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        if is_ours and signal.getsignal(signal.SIGINT) is first:
            signal.signal(signal.SIGINT, signal.default_int_handler)
