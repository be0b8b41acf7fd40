"""Totals: counts of the requests that one engine has served, for its metrics summary."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import Any

from enginebay_esurge.outputs import RequestOutput

WINDOW_S = 60.0
"""Requests per second are averaged over this number of seconds."""


class Totals:
    """Counts and sums of one engine's ended requests. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.listeners: tuple[Callable[[RequestOutput], None], ...] = ()
        """Called with every completed request on its reader's thread; replace the whole tuple."""
        self._clock = clock
        # Reentrant: garbage collection may end a stream while the lock is held.
        self._lock = threading.RLock()
        self._since_s: float | None = None
        self._ended_s: collections.deque[float] = collections.deque()
        self._num_completed = 0
        self._num_failed = 0
        self._num_tokens = 0
        self._num_drafted = self._num_accepted = 0
        self._sums = dict.fromkeys(("latency", "ttft", "throughput"), 0.0)

    @property
    def has_begun(self) -> bool:
        """Whether the engine was ever started."""
        return self._since_s is not None

    def begin(self) -> None:
        """Start the clock at the first call."""
        with self._lock:
            if self._since_s is None:
                self._since_s = self._clock()

    def completed(self, output: RequestOutput) -> None:
        """Count a request that ended with "stop" or "length"."""
        with self._lock:
            self._num_completed += 1
            self._num_tokens += output.num_generated_tokens
            metrics = output.metrics or {}
            self._num_drafted += metrics.get("draft_tokens", 0)
            self._num_accepted += metrics.get("accepted_tokens", 0)
            self._sums["latency"] += output.processing_time
            self._sums["ttft"] += output.first_token_time or 0.0
            self._sums["throughput"] += output.tokens_per_second
            self._ended_s.append(self._clock())
            self._forget_old()
        for listener in self.listeners:
            listener(output)

    def failed(self, num_tokens: int) -> None:
        """Count a request that was aborted, abandoned or ended by an error, with its number of
        tokens.
        """
        with self._lock:
            self._num_failed += 1
            self._num_tokens += num_tokens

    def summary(self) -> dict[str, Any]:
        """Return counts, and averages over the completed requests (0.0 without any)."""
        with self._lock:
            self._forget_old()
            since_s = self._clock() if self._since_s is None else self._since_s
            span_s = min(WINDOW_S, self._clock() - since_s)
            averages = {
                name: total / max(1, self._num_completed) for name, total in self._sums.items()
            }
            return {
                "requests_per_second": len(self._ended_s) / span_s if span_s > 0 else 0.0,
                "average_latency": averages["latency"],
                "average_ttft": averages["ttft"],
                "average_throughput": averages["throughput"],
                "total_completed": self._num_completed,
                "total_failed": self._num_failed,
                "total_tokens": self._num_tokens,
                "total_draft_tokens": self._num_drafted,
                "total_accepted_tokens": self._num_accepted,
            }

    def _forget_old(self) -> None:
        while self._ended_s and self._clock() - self._ended_s[0] > WINDOW_S:
            self._ended_s.popleft()
