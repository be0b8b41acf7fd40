"""Ends child processes with their parent: a stage that outlives the run would keep the device's
memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""An option of prctl(2), which only Linux has."""


def end_with_parent() -> None:
    """Have this process killed when its parent ends for any reason."""
    parent = os.getppid()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before prctl
        sys.exit("the process that started this one has ended")
