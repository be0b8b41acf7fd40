"""What a loop tells of its work to who observes it: scheduler updates, steps that were read,
requests that ended.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from enginebay.cache import Ledger
from enginebay.engine import StepPlan
from enginebay.loop.request_table import RequestState, RequestTable
from enginebay.outputs import RequestMetrics
from enginebay.types import FinishReason, Request

log = logging.getLogger("enginebay.loop")


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """A decision of the scheduler that launched something. Times are in seconds, `at_s` of the
    monotonic clock.

    `num_rows` and `num_tokens` are those of what it launched; of a decode step, tokens are the most
    that it can give. `num_preempted` counts since the update before. The rest is as of now.
    """

    at_s: float
    schedule_s: float
    launch_s: float
    num_rows: int
    num_tokens: int
    num_preempted: int
    num_waiting: int
    num_running: int
    num_free_tokens: int
    """Tokens that the cache could still promise."""


@dataclasses.dataclass(frozen=True, slots=True)
class Execution:
    """A step whose tokens were read. `num_new_tokens` are those of requests that had not ended.

    `execute_s` counts from its launch, or from the end of the step before it when that came later:
    steps overlap with the host's work, and not with each other.
    """

    at_s: float
    execute_s: float
    num_rows: int
    num_new_tokens: int
    num_drafts: int = 0
    """Rows whose next tokens were guessed, those of requests that had ended left out."""
    num_draft_tokens: int = 0
    """How many tokens guessed for them were verified."""
    num_accepted_tokens: int = 0
    """How many of these held."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """A completion that ended. One that its reader ends, by a stop text too, has the reason
    "abort".
    """

    request: Request
    reason: FinishReason
    metrics: RequestMetrics


class Observer(ABC):
    """Is told of a loop's work, on the loop's thread: it must be quick. One that raises is told
    nothing any more.
    """

    @abstractmethod
    def updated(self, update: Update) -> None:
        """Steps were launched, and may not have run yet. Without `overlap_execution` all but the
        last were read already.
        """

    @abstractmethod
    def executed(self, execution: Execution) -> None:
        """A step was read; its tokens are not yet told to their readers."""

    @abstractmethod
    def ended(self, ending: Ending) -> None:
        """A request ended; its reader does not know yet."""


class Observers:
    """Tells the observers of a loop, or of several that run one after the other. A loop asks
    `is_on` before it measures anything.

    `add` and `remove` may be called from any thread; the rest belongs to the loop's.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._observers: tuple[Observer, ...] = ()
        self._lock = threading.Lock()
        self._last_read_s = -math.inf
        self._schedule: tuple[float, float] | None = None
        self._num_rows = self._num_tokens = self._num_preempted = 0

    def __len__(self) -> int:
        """How many observers there are."""
        return len(self._observers)

    def add(self, observer: Observer) -> None:
        """Tell one more, from the next update on, after those that are told already."""
        with self._lock:
            self._set((*self._observers, observer))

    def remove(self, observer: Observer) -> None:
        """Tell one nothing any more; one that is not told anything is left alone."""
        with self._lock:
            self._set(tuple(one for one in self._observers if one is not observer))

    def _set(self, observers: tuple[Observer, ...]) -> None:
        self._observers, self.is_on = observers, bool(observers)

    # The loop's thread.

    def preempted(self) -> None:
        """A running request has lost its row."""
        self._num_preempted += 1

    def decided(self, began_s: float) -> None:
        """The scheduler has made a decision that began at `began_s`, and it will be carried out."""
        self._schedule = began_s, time.monotonic()
        self._num_rows = self._num_tokens = 0

    def carried_out(self, requests: RequestTable, ledger: Ledger) -> None:
        """The decision was carried out. A preemption alone is told with the next update."""
        if self._schedule is None or not self._num_rows:
            return
        (began_s, decided_s), self._schedule = self._schedule, None
        now_s = time.monotonic()
        update = Update(
            now_s,
            decided_s - began_s,
            now_s - decided_s,
            self._num_rows,
            self._num_tokens,
            self._num_preempted,
            len(requests.waiting),
            len(requests.running),
            ledger.num_free_tokens,
        )
        self._num_preempted = 0
        self._tell(lambda observer: observer.updated(update))

    def launched(self, plan: StepPlan) -> float:
        """A step was launched, at the time that this returns."""
        self._num_rows += len(plan.rows)
        if plan.is_decode:
            self._num_tokens += len(plan.rows) * plan.num_steps
        else:
            self._num_tokens += sum(row.num_tokens for row in plan.rows)
        return time.monotonic()

    def read(
        self,
        launched_s: float,
        rows: Iterable[RequestState],
        tokens: np.ndarray,
        now_s: float,
        num_drafts: Sequence[int] = (),
    ) -> None:
        """The tokens int32 [rows, steps] of a step have come, and are not recorded yet.
        `num_drafts` are those of each row of a step that verifies some.

        `launched_s` nan: nobody observed then, and nobody is told.
        """
        began_s, self._last_read_s = max(self._last_read_s, launched_s), now_s
        if math.isnan(launched_s):
            return
        counts = [
            0 if tracked.finished else int((row >= 0).sum())
            for tracked, row in zip(rows, tokens, strict=True)
        ]
        verified = [
            (drafts, new) for drafts, new in zip(num_drafts, counts, strict=False) if drafts and new
        ]
        execution = Execution(
            now_s,
            now_s - began_s,
            len(counts),
            sum(counts),
            num_drafts=len(verified),
            num_draft_tokens=sum(drafts for drafts, _ in verified),
            num_accepted_tokens=sum(new - 1 for _, new in verified),
        )
        self._tell(lambda observer: observer.executed(execution))

    def ended(self, tracked: RequestState, reason: FinishReason) -> None:
        """A request has ended, and its metrics are final."""
        ending = Ending(tracked.request, reason, tracked.metrics)
        self._tell(lambda observer: observer.ended(ending))

    def _tell(self, tell: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            has_failed = True
            try:
                tell(observer)
                has_failed = False
            except Exception:  # what an observer raises must not end the service
                log.exception(
                    "an observer of type %s failed: it is told nothing any more",
                    type(observer).__name__,
                )
            finally:
                if has_failed:
                    self.remove(observer)
