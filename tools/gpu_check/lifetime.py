"""Processes that do not outlive the one that started them: a lost stage would keep the device's memory from the next."""

from __future__ import annotations

import contextlib
import ctypes
import signal

PR_SET_PDEATHSIG = 1
"""Of prctl(2), which Linux alone has."""


def end_with_parent() -> None:
    """Have this process killed when its parent ends, however that ends."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
