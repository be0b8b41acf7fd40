"""IdleRelease: gives an engine's memory back while no request is there."""

from __future__ import annotations

import queue
import time

from enginebay.contracts.engine import Engine
from enginebay.serving.messages import Inbox, LoopMessage


class IdleRelease:
    """Calls `Engine.release_memory` when it is due. Belongs to the loop's thread."""

    def __init__(self, engine: Engine, after_s: float | None) -> None:
        """`after_s`: seconds without a request after which the first call is due; None: never."""
        self._engine, self.after_s = engine, after_s
        self._due_s: float | None = None  # monotonic time; None: not before the next request
        self.has_worked = True
        """Whether requests were there since the last wait."""

    def next_message(self, inbox: Inbox) -> LoopMessage:
        """Wait for a message while no request is there."""
        if self.has_worked:
            self._due_s = None if self.after_s is None else time.monotonic() + self.after_s
            self.has_worked = False
        while self._due_s is not None:
            try:
                return inbox.get(max(0.0, self._due_s - time.monotonic()))
            except queue.Empty:
                wait_s = self._engine.release_memory()
                self._due_s = None if wait_s is None else time.monotonic() + wait_s
        return inbox.get()
