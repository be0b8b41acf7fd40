"""Processes that do not outlive the one that started them: a lost stage would keep the device's
memory from the next.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""Of prctl(2), which Linux alone has."""


def end_with_parent() -> None:
    """Have this process killed when its parent ends, however that ends."""
    parent = os.getppid()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it has just ended
        sys.exit("the process that started this one has ended")
