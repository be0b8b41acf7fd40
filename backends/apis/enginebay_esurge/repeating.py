"""Repeater: a thread that calls a function at intervals until it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable

from enginebay.waits import has_ended


class Repeater:
    """Calls `function` every interval_s seconds on a daemon thread of its own; the first call comes
    after one interval.
    """

    def __init__(self, name: str, interval_s: float, function: Callable[[], None]) -> None:
        self._function = function
        self._interval_s = interval_s
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after a running call has returned; see has_ended. Stopping twice is
        allowed.
        """
        self._stops.set()
        if threading.current_thread() is not self._thread:  # else a finalizer on this thread
            has_ended(self._thread)

    def _run(self) -> None:
        while not self._stops.wait(self._interval_s):
            self._function()
