"""A history of an engine's work for monitoring, and the figures computed from it."""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
import time
from collections.abc import Iterable

from enginebay.contracts.engine import Engine
from enginebay.errors import InternalError
from enginebay.serving.observer import Ending, Execution, Observer, Update
from enginebay_esurge.outputs import RequestOutput
from enginebay_esurge.service import Service
from enginebay_esurge.totals import Totals
from enginebay_paged.ledger import PageLedger
from enginebay_paged.pool import PagePool

WINDOW_S = 10.0
"""Tokens per second are averaged over this number of seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """The state of an engine at one moment. Means are over the history; 0.0 for an empty
    history.
    """

    unix_s: float
    num_completed: int
    num_failed: int
    num_tokens: int
    requests_per_second: float
    tokens_per_second: float
    num_waiting: int
    num_running: int
    num_preempted: int
    num_scheduled_tokens: int
    """Tokens of the last update."""
    num_draft_tokens: int
    """Tokens drafted by a proposer and verified by steps."""
    num_accepted_tokens: int
    """Draft tokens that were accepted."""
    num_pages: int
    num_pages_used: int
    cache_hit_rate: float
    mean_batch_size: float
    mean_schedule_s: float
    mean_execute_s: float
    mean_first_token_s: float
    mean_latency_s: float


class History(Observer):
    """Keeps the last `size` updates, steps and requests of an engine, and counts from its creation
    on. Thread-safe.
    """

    def __init__(self, service: Service, totals: Totals, size: int) -> None:
        self.service = service
        self._totals = totals
        self._since = totals.summary()
        self._lock = threading.Lock()
        self._updates: collections.deque[Update] = collections.deque(maxlen=size)
        self._executions: collections.deque[Execution] = collections.deque(maxlen=size)
        self._outputs: collections.deque[tuple[float, float | None]] = collections.deque(
            maxlen=size
        )
        self._num_preempted = self._num_tokens = self._num_prompt = self._num_cached = 0
        self._num_drafted = self._num_accepted = 0

    # Called on the engine's thread.

    def updated(self, update: Update) -> None:
        with self._lock:
            self._updates.append(update)
            self._num_preempted += update.num_preempted

    def executed(self, execution: Execution) -> None:
        with self._lock:
            self._executions.append(execution)
            self._num_tokens += execution.num_new_tokens
            self._num_drafted += execution.num_draft_tokens
            self._num_accepted += execution.num_accepted_tokens

    def ended(self, ending: Ending) -> None:
        metrics = ending.metrics
        if not math.isnan(metrics.first_scheduled_s):
            with self._lock:
                self._num_prompt += metrics.num_prompt_tokens
                self._num_cached += metrics.num_cached_tokens

    # Called on any thread.

    def completed(self, output: RequestOutput) -> None:
        """Record a request that ended with "stop" or "length"."""
        with self._lock:
            self._outputs.append((output.processing_time, output.first_token_time))

    @property
    def num_pages(self) -> int:
        """Number of pages of the cache."""
        return sum(p.num_usable for p in page_pools(self.service.parts.engine))

    @property
    def num_pages_used(self) -> int:
        """Number of pages that requests hold. Read without a lock, so it may be off by one
        or two.
        """
        return max(0, sum(p.num_used for p in page_pools(self.service.parts.engine)))

    @property
    def cache_hit_rate(self) -> float:
        """Share of the ended requests' prompt tokens that were found in the cache."""
        with self._lock:
            return self._num_cached / max(1, self._num_prompt)

    @property
    def speculates(self) -> bool:
        """Whether the engine has a proposer."""
        return self.service.parts.proposer is not None

    def count(self, name: str) -> int:
        """Return `total_completed` or `total_failed` of the metrics summary since the creation."""
        return int(self._totals.summary()[name] - self._since[name])

    def figures(self) -> Figures:
        """Return the current figures."""
        hit_rate, now_s = self.cache_hit_rate, time.monotonic()
        with self._lock:
            updates, executions, outputs = (
                list(self._updates),
                list(self._executions),
                list(self._outputs),
            )
            num_tokens, num_preempted = self._num_tokens, self._num_preempted
            num_drafted, num_accepted = self._num_drafted, self._num_accepted
        recent = [execution for execution in executions if now_s - execution.at_s <= WINDOW_S]
        span_s = now_s - recent[0].at_s + recent[0].execute_s if recent else 0.0
        return Figures(
            unix_s=time.time(),
            num_completed=self.count("total_completed"),
            num_failed=self.count("total_failed"),
            num_tokens=num_tokens,
            requests_per_second=self._totals.summary()["requests_per_second"],
            tokens_per_second=sum(e.num_new_tokens for e in recent) / span_s if span_s > 0 else 0.0,
            num_waiting=self.service.num_waiting,
            num_running=self.service.num_running,
            num_preempted=num_preempted,
            num_scheduled_tokens=updates[-1].num_tokens if updates else 0,
            num_draft_tokens=num_drafted,
            num_accepted_tokens=num_accepted,
            num_pages=self.num_pages,
            num_pages_used=self.num_pages_used,
            cache_hit_rate=hit_rate,
            mean_batch_size=_mean(update.num_rows for update in updates),
            mean_schedule_s=_mean(update.schedule_s for update in updates),
            mean_execute_s=_mean(execution.execute_s for execution in executions),
            mean_first_token_s=_mean(first for _, first in outputs if first is not None),
            mean_latency_s=_mean(latency for latency, _ in outputs),
        )


def page_pools(engine: Engine) -> list[PagePool]:
    """Return the page pool of each cache group. The engine of an eSurge has a PageLedger."""
    if not isinstance(engine.ledger, PageLedger):
        raise InternalError(f"an eSurge over a {type(engine.ledger).__name__}")
    return [group.store.pool for group in engine.ledger.groups.values()]


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0
