"""Repeater: a thread that does something again and again until it is told to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Repeater:
    """Calls `function` every interval_s seconds, first after one of them, on a daemon thread of its
    own.
    """

    def __init__(self, name: str, interval_s: float, function: Callable[[], None]) -> None:
        self._function = function
        self._interval_s = interval_s
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a call that is under way ends first. Stopping twice is fine."""
        self._stops.set()
        if threading.current_thread() is not self._thread:  # garbage may be collected anywhere
            self._thread.join()

    def _run(self) -> None:
        while not self._stops.wait(self._interval_s):
            self._function()
