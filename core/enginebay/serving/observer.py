"""Observer: the interface for metrics. A loop reports its decisions, the steps that it has read,
and ended requests.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from enginebay.contracts.cache import Ledger
from enginebay.contracts.engine import StepPlan
from enginebay.ops.spec import Bucket
from enginebay.outputs import RequestMetrics
from enginebay.serving.in_flight import InFlight
from enginebay.serving.not_finite import rows_not_finite
from enginebay.serving.request_table import RequestTable
from enginebay.serving.running import Running
from enginebay.types import FinishReason, Request

log = logging.getLogger("enginebay.loop")


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """A scheduler decision that launched at least one step.

    `at_s` is a time of the monotonic clock; `schedule_s` and `launch_s` are the seconds that the
    decision and the launches took. `num_rows` and `num_tokens` count what was launched; a decode
    step counts the largest number of tokens that it can produce. `num_preempted` counts preemptions
    since the update before. The other fields are as of `at_s`.
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
    """Tokens of cache that are not reserved."""


@dataclasses.dataclass(frozen=True, slots=True)
class Execution:
    """A step whose tokens were read. `num_new_tokens` counts tokens of requests that had not ended.

    `execute_s` is the time since the step's launch, or since the step before it was read if that
    came later: steps overlap with work of the host, but not with each other.
    """

    at_s: float
    execute_s: float
    num_rows: int
    num_new_tokens: int
    num_prompt_tokens: int = 0
    """Prompt tokens that the step computed; 0 for a decode."""
    num_drafts: int = 0
    """Rows with drafts, without rows whose request had ended."""
    num_draft_tokens: int = 0
    """Draft tokens of these rows that were verified."""
    num_not_finite: int = 0
    """Rows whose logits had NaN or infinity, without rows whose request had ended."""
    num_accepted_tokens: int = 0
    """Draft tokens that were accepted."""
    bucket: Bucket | None = None
    """The sizes of the compiled program that ran; None for an engine without buckets."""
    num_tokens: int = 0
    """Tokens that the step was launched for; a decode counts tokens of rows that ended."""
    num_bucket_tokens: int = 0
    """Tokens of `bucket` in all passes of the step. What exceeds `num_tokens` is padding. 0 for a
    verify step and without a bucket.
    """
    num_passes: int = 0
    """Passes of the model that a decode ran: fewer than `plan.num_steps` when all rows ended
    early. 0 for a prefill and for a verify step.
    """
    plan: StepPlan | None = None
    """The step as it was launched."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """A completion that ended. The reason is "abort" when its reader ended it, which includes stop
    texts: the reader finds them.
    """

    request: Request
    reason: FinishReason
    metrics: RequestMetrics


class Observer(ABC):
    """Receives reports of a loop's work. Its methods run on the loop's thread, so they must be
    quick. An observer that raises is removed.

        class PrintSteps(Observer):
            def updated(self, update): ...
            def executed(self, execution):
                print(execution.num_new_tokens, execution.execute_s)
            def ended(self, ending): ...

        llm.loop.observers.add(PrintSteps())
    """

    @abstractmethod
    def updated(self, update: Update) -> None:
        """Steps were launched, and may still be running. Without `overlap_execution` all but the
        last were read already.
        """

    @abstractmethod
    def executed(self, execution: Execution) -> None:
        """A step was read. Its tokens are not yet handed to the readers."""

    @abstractmethod
    def ended(self, ending: Ending) -> None:
        """A completion ended. Its reader does not know yet."""


class Observers:
    """The observers of a loop, or of several loops that run one after the other. A loop checks
    `is_on` before it measures anything.

    `add` and `remove` may be called from any thread; the loop calls the other methods on its
    thread.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._observers: tuple[Observer, ...] = ()
        self._lock = threading.Lock()
        self._last_read_s = -math.inf
        self._schedule: tuple[float, float] | None = None
        self._num_rows = self._num_tokens = self._num_preempted = 0

    def __len__(self) -> int:
        """Number of observers."""
        return len(self._observers)

    def add(self, observer: Observer) -> None:
        """Add an observer. It is called from the next update on, after the earlier observers."""
        with self._lock:
            self._set((*self._observers, observer))

    def remove(self, observer: Observer) -> None:
        """Remove an observer; an unknown one is ignored."""
        with self._lock:
            self._set(tuple(one for one in self._observers if one is not observer))

    def _set(self, observers: tuple[Observer, ...]) -> None:
        self._observers, self.is_on = observers, bool(observers)

    # The loop's thread.

    def preempted(self) -> None:
        """A running request has lost its row."""
        self._num_preempted += 1

    def decided(self, began_s: float) -> None:
        """The scheduler has made a decision, begun at `began_s`, which is launched next."""
        self._schedule = began_s, time.monotonic()
        self._num_rows = self._num_tokens = 0

    def carried_out(self, requests: RequestTable, ledger: Ledger) -> None:
        """The decision was launched: report an Update. A preemption without a launch is reported
        with the next update.
        """
        if self._schedule is None or not self._num_rows:
            return
        (began_s, decided_s), self._schedule = self._schedule, None
        now_s = time.monotonic()
        update = Update(
            at_s=now_s,
            schedule_s=decided_s - began_s,
            launch_s=now_s - decided_s,
            num_rows=self._num_rows,
            num_tokens=self._num_tokens,
            num_preempted=self._num_preempted,
            num_waiting=len(requests.waiting),
            num_running=len(requests.running),
            num_free_tokens=ledger.num_free_tokens,
        )
        self._num_preempted = 0
        self._report(lambda observer: observer.updated(update))

    def launched(self, plan: StepPlan) -> float:
        """Count a launched step. Returns the time of its launch."""
        self._num_rows += len(plan.rows)
        self._num_tokens += _num_tokens(plan)
        return time.monotonic()

    def read(
        self, step: InFlight, tokens: np.ndarray, now_s: float, num_drafts: Sequence[int] = ()
    ) -> None:
        """Report an Execution: tokens int32 [rows, steps] of a step were read, and are not recorded
        yet. `num_drafts` are the drafts of each row of a verify step.

        When there was no observer at the launch, nothing is reported.
        """
        began_s, self._last_read_s = max(self._last_read_s, step.launched_s), now_s
        if math.isnan(step.launched_s):
            return
        made = (tokens >= 0).sum(axis=1).tolist()
        counts = [0 if one.finished else n for one, n in zip(step.rows, made, strict=True)]
        verified = [
            (drafts, new) for drafts, new in zip(num_drafts, counts, strict=False) if drafts and new
        ]
        plan, bucket = step.plan, step.pending.bucket
        num_passes = 0 if plan.verifies else max(1, plan.num_steps)
        execution = Execution(
            now_s,
            now_s - began_s,
            len(counts),
            sum(counts),
            num_prompt_tokens=_num_prompt_tokens(plan),
            num_not_finite=sum(not step.rows[row].finished for row in rows_not_finite(tokens)),
            num_drafts=len(verified),
            num_draft_tokens=sum(drafts for drafts, _ in verified),
            num_accepted_tokens=sum(new - 1 for _, new in verified),
            bucket=bucket,
            num_tokens=_num_tokens(plan),
            num_bucket_tokens=bucket.tokens * num_passes if bucket else 0,
            num_passes=max(made) if plan.is_decode and num_passes else 0,
            plan=plan,
        )
        self._report(lambda observer: observer.executed(execution))

    def ended(self, tracked: Running, reason: FinishReason) -> None:
        """Report an Ending: a request has ended, and its metrics are final."""
        ending = Ending(tracked.request, reason, tracked.metrics)
        self._report(lambda observer: observer.ended(ending))

    def _report(self, report: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            has_failed = True
            try:
                report(observer)
                has_failed = False
            except Exception:  # an observer's bug must not end the service
                log.exception(
                    "an observer of type %s failed: it is removed",
                    type(observer).__name__,
                )
            finally:
                if has_failed:
                    self.remove(observer)


def _num_tokens(plan: StepPlan) -> int:
    """Return the tokens that a step computes; of a decode, the most that it can produce."""
    return len(plan.rows) * plan.num_steps if plan.is_decode else _num_prompt_tokens(plan)


def _num_prompt_tokens(plan: StepPlan) -> int:
    """Return the prompt tokens of a prefill; rows of it that decode count one token each."""
    return 0 if plan.is_decode else sum(row.num_tokens for row in plan.rows)
