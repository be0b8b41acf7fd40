"""StepRunner: carries out the scheduler's decisions, and reads the steps' tokens."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from enginebay.config import EngineConfig
from enginebay.contracts.engine import Engine, TokenLogprobs
from enginebay.contracts.proposer import Proposer
from enginebay.contracts.scheduler import Decision, Limits
from enginebay.errors import EnginebayError
from enginebay.serving.admission import Admission
from enginebay.serving.guided import PATIENCE_S, advance_all, collect_masks
from enginebay.serving.in_flight import InFlight
from enginebay.serving.not_finite import not_finite
from enginebay.serving.observer import Observers
from enginebay.serving.planning import StepPlanner
from enginebay.serving.request_table import RequestTable
from enginebay.serving.running import Running, TokenEvent
from enginebay.serving.speculation import Speculation
from enginebay.types import NOT_FINITE, FinishReason


class StepRunner:
    """Turns scheduler decisions into engine steps, and the steps' tokens into events. Belongs to
    the loop's thread.
    """

    def __init__(
        self,
        engine: Engine,
        config: EngineConfig,
        requests: RequestTable,
        proposer: Proposer | None = None,
        flush: Callable[[], None] = lambda: None,
        observers: Observers | None = None,
    ) -> None:
        """`flush` is called after the events of a step were put."""
        self.engine = engine
        self._flush = flush
        self.config = config
        self.requests = requests
        self.admission = Admission(engine, requests)
        self.speculation = None if proposer is None else Speculation(proposer, config, engine.rows)
        self.observers = Observers() if observers is None else observers
        self.planner = StepPlanner(
            engine, config, self.admission, self.speculation, self.commit_all
        )
        self.in_flight: collections.deque[InFlight] = collections.deque()
        """Launched steps that were not read."""
        self.late: list[Running] = []
        """Requests whose masks were ordered and not yet collected."""
        self._patience_s = 0.0  # wait for masks until this time of the monotonic clock
        self.awaits_stop_texts = False
        """Whether tokens were put whose text may end a request."""

    @property
    def is_idle(self) -> bool:
        """Whether there is no request and no unread step."""
        return not self.in_flight and self.requests.is_empty

    def limits(self) -> Limits:
        """The limits of the next decision."""
        return Limits(
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_decode_steps=self.config.decode_steps,
            free_rows=self.config.max_num_seqs - len(self.requests.running),
            free_tokens=self.engine.ledger.num_free_tokens,
            stream_chunk_tokens=self.config.stream_chunk_tokens,
        )

    def add(self, tracked: Running) -> None:
        """Queue a request. A request that needs more cache than the engine has would wait forever,
        so it ends at once.
        """
        self.requests.add(tracked)
        refusal = self.admission.refusal(tracked)
        if refusal is not None:
            self.end(tracked, "error", refusal)

    def launch(self, decision: Decision) -> bool:
        """Carry out a decision. Returns whether anything was launched."""
        for request_id in decision.preempt:
            self._preempt(request_id)
        launched = False
        for plan, rows in self.planner.steps(decision):
            self.planner.current_requests = rows
            pending = self.engine.step(plan)
            launched_s = self.observers.launched(plan) if self.observers.is_on else math.nan
            self.in_flight.append(InFlight(pending, plan, rows, launched_s))
            self.planner.current_requests = None
            launched = True
        return launched

    def is_stuck(self, decision: Decision) -> bool:
        """Whether running rows cannot go on after a decision that launched nothing, because each
        needs cache that another row holds.
        """
        if self.in_flight or self.late:
            return False
        return self.admission.is_stuck(refused=bool(decision.decode))

    def free_cache(self, chosen: Sequence[str]) -> None:
        """Preempt the `chosen` requests. When none of them runs, preempt the latest arrival, so
        that no scheduler can stall the loop.
        """
        running = self.requests.running
        named = [name for name in chosen if name in running]
        for name in named or [max(running, key=lambda name: running[name].request.arrival_s)]:
            self._preempt(name)

    def commit_next(self) -> None:
        """Read the oldest launched step and put its tokens as events. Rows whose request has ended
        meanwhile are skipped.
        """
        step = self.in_flight.popleft()
        self.planner.current_requests = step.rows
        tokens = step.pending.read()
        now_s = time.monotonic()
        counts = (tokens >= 0).sum(axis=1)
        num_drafts = [0] * len(counts)
        if self.speculation is not None:
            num_drafts = self.speculation.verified(step.plan, counts.tolist())
        if self.observers.is_on:
            self.observers.read(step, tokens, now_s, num_drafts)
        guided = [tracked for tracked in step.rows if tracked.constraint is not None]
        failures = advance_all(step.rows, tokens, counts) if guided else {}
        self._patience_s = time.monotonic() + PATIENCE_S
        self.admission.append(step.rows, tokens, counts)
        logprobs: Sequence[TokenLogprobs | None] = [None] * len(step.rows)
        if [tracked for tracked in step.rows if tracked.num_logprobs is not None]:
            logprobs = step.logprobs(tokens, counts.tolist())
        failed_hidden = [] if step.plan.is_decode else step.take_prompts()
        if failed_hidden or (tokens == NOT_FINITE).any():
            failures |= not_finite(step, tokens, failed_hidden, self.config.dtype)
        for tracked, row_tokens, count, row_logprobs, drafted in zip(
            step.rows, tokens.tolist(), counts.tolist(), logprobs, num_drafts, strict=True
        ):
            if tracked.finished:
                continue
            self.planner.current_requests = [tracked]
            del row_tokens[count:]
            failure = failures.get(id(tracked)) if failures else None
            if failure is not None:
                self.end(tracked, "error", failure)
                continue
            if tracked.constraint is not None and tracked.is_late:
                self.late.append(tracked)
            event = tracked.record(row_tokens, now_s, row_logprobs)
            if self.speculation is not None:
                self.speculation.learn(tracked, drafted, count)
            if tracked.finished:
                self._finish(tracked, event)
            elif event.token_ids:
                tracked.put(event)
                self.awaits_stop_texts = self.awaits_stop_texts or tracked.ends_by_text
        self.planner.current_requests = None
        self._flush()

    def collect_late(self) -> None:
        """Collect masks of late rows, and end requests whose text ends there."""
        self.late, ended = collect_masks(self.late, self._patience_s)
        for tracked, reason, error in ended:
            self.end(tracked, reason, error)

    def commit_all(self) -> None:
        """Read every launched step."""
        while self.in_flight:
            self.commit_next()

    def end(
        self, tracked: Running, reason: FinishReason, error: EnginebayError | None = None
    ) -> None:
        """End a request before its output is complete."""
        tracked.finished = True
        tracked.metrics.finished_s = time.monotonic()
        self._finish(tracked, TokenEvent((), reason, tracked.metrics, error))

    def restart(self) -> None:
        """Replace the engine's arrays after a failure. Running requests lose their rows and are
        queued again.
        """
        self.planner.current_requests = None
        self.in_flight.clear()
        # Reversed, because each goes to the front of the queue.
        for request_id in reversed(list(self.requests.running)):
            self._preempt(request_id, arrays_are_good=False)
        self.engine.rows.clear()  # also rows whose admission failed half-way
        self.engine.drop_arrays()
        self.engine.make_arrays()

    def _preempt(self, request_id: str, *, arrays_are_good: bool = True) -> None:
        """Free a running request's row, after reading its launched steps."""
        self.commit_all()
        tracked = self.requests.running.get(request_id)
        if tracked is not None:
            is_decoding = tracked.output and tracked.num_computed >= tracked.num_prefill
            if (
                arrays_are_good
                and is_decoding
                and tracked.request.sampling.processors
                and tracked.lease
            ):
                # Its output is prefilled again; the state of its processors is kept.
                values = self.engine.row_values(tracked.lease)
                sampling = replace(tracked.request.sampling, processors=values)
                tracked.request = replace(tracked.request, sampling=sampling)
            self.admission.free(tracked)
            self.requests.requeue(tracked)
            if self.observers.is_on:
                self.observers.preempted()

    def _finish(self, tracked: Running, last: TokenEvent) -> None:
        """Remove an ended request and free its row. Its reader gets the last event even when an
        observer or a ledger raises.
        """
        try:
            self.requests.drop(tracked)
            self.admission.free(tracked)
        finally:
            try:
                if self.observers.is_on and last.finish_reason:
                    self.observers.ended(tracked, last.finish_reason)
            finally:
                tracked.put(last)
