"""Watch: the latest steps and endings of an engine, for the page at /ui."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Any

from enginebay.serving.observer import Ending, Execution, Observer, Update

NUM_STEPS = 1024
"""Number of records that are kept. A page that reads them once a second misses none."""


class Watch(Observer):
    """Records steps and endings. Its methods run on the engine's thread; `since` on any thread.

    Records are numbered, so that a page reads newer ones only. Times are seconds since the
    Unix epoch.
    """

    def __init__(self) -> None:
        self._records: deque[dict[str, Any]] = deque(maxlen=NUM_STEPS)
        self._next = 0
        self._offset_s = time.time() - time.monotonic()
        self._latest: dict[str, int] = {}

    def updated(self, update: Update) -> None:
        self._latest = {"waiting": update.num_waiting, "running": update.num_running}
        if update.num_preempted:
            self._add("preempt", update.at_s, 0.0, {"rows": update.num_preempted})

    def executed(self, execution: Execution) -> None:
        prompt = execution.num_prompt_tokens
        figures = {
            "rows": execution.num_rows,
            "tokens": execution.num_new_tokens,
            "prompt_tokens": prompt,
            **self._latest,
        }
        kind = "prefill" if prompt else "decode"
        self._add(kind, execution.at_s - execution.execute_s, execution.execute_s, figures)

    def ended(self, ending: Ending) -> None:
        """Record a completion, unless it never began and so has no times."""
        times = ending.metrics
        if math.isnan(times.finished_s) or math.isnan(times.first_token_s):
            return
        figures = {
            "reason": ending.reason,
            "tokens": times.num_generated_tokens,
            "cached": times.num_cached_tokens,
            "first_s": times.first_token_s - times.arrival_s,
        }
        self._add("end", times.arrival_s, times.finished_s - times.arrival_s, figures)

    def since(self, number: int) -> tuple[int, list[dict[str, Any]]]:
        """Return (number of the next record, records from `number` on that are still kept)."""
        records = list(self._records)
        return self._next, [one for one in records if one["number"] >= number]

    def _add(self, kind: str, at_s: float, seconds: float, figures: dict[str, Any]) -> None:
        record = {"number": self._next, "kind": kind, "at": at_s + self._offset_s, "s": seconds}
        self._records.append(record | figures)
        self._next += 1
