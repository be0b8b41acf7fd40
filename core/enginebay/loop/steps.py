"""StepRunner: launches the scheduler's decisions on the engine, and reads the steps' tokens."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from enginebay.config import EngineConfig
from enginebay.engine import Engine, RowPlan, StepPlan
from enginebay.errors import EnginebayError, InternalError
from enginebay.loop.admission import Admission
from enginebay.loop.guided import PATIENCE_S, advance_all, collect_masks, must_wait, next_mask
from enginebay.loop.in_flight import InFlight
from enginebay.loop.messages import Ticket, TokenEvent
from enginebay.loop.observer import Observers
from enginebay.loop.request_table import RequestState, RequestTable, record_tokens
from enginebay.loop.speculation import Speculation
from enginebay.proposer import MAX_VERIFIED_ROWS, Proposer
from enginebay.scheduler import Decision, Limits
from enginebay.types import FinishReason


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
        self.in_flight: collections.deque[InFlight] = collections.deque()
        self.current_requests: Sequence[RequestState] | None = None
        """The requests of the step that is being launched or read; they end if it fails."""
        self.late: list[RequestState] = []
        """Requests whose masks were ordered and not yet collected."""
        self._patience_s = 0.0  # wait for masks until this time of the monotonic clock
        self._mixes = config.mixed_steps == "on" and proposer is None
        self.awaits_stop_texts = False
        """Whether tokens were put whose text may end a request."""

    @property
    def is_idle(self) -> bool:
        """Whether there is no request and no unread step."""
        return self.requests.is_empty and not self.in_flight

    @property
    def _drafting(self) -> Speculation | None:
        """What drafts the next tokens of rows; None without a proposer, and for too many rows."""
        return self.speculation if len(self.requests.running) <= MAX_VERIFIED_ROWS else None

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

    def add(self, ticket: Ticket) -> None:
        """Queue a request. A request that needs more cache than the engine has would wait forever,
        so it ends at once.
        """
        tracked = self.requests.add(ticket)
        refusal = self.admission.refusal(tracked)
        if refusal is not None:
            self.end(tracked, "error", refusal)

    def launch(self, decision: Decision) -> bool:
        """Carry out a decision. Returns whether anything was launched or preempted.

        When nothing is launched because running rows lack cache, the latest arrival is preempted,
        so that no scheduler can stall the loop.
        """
        for request_id in decision.preempt:
            self._preempt(request_id)
        steps, decoding = self._reserve(decision)  # before admission uses the free cache
        beside = decoding if self._mixes else []
        prefilled = self._launch_prefill(decision, beside)
        decoding = [] if prefilled and beside else decoding
        if prefilled and not self.config.overlap_execution:
            self.commit_all()
        launched = self._launch_decode(decoding, steps) or prefilled
        if launched or self.in_flight or self.late:
            return launched
        latest = self.admission.choose_preempted(refused=bool(decision.decode))
        if latest is not None:
            self._preempt(latest.request.request_id)
        return latest is not None

    def commit_next(self) -> None:
        """Read the oldest launched step and put its tokens as events. Rows whose request has ended
        meanwhile are skipped.
        """
        step = self.in_flight.popleft()
        self.current_requests = step.rows
        tokens = step.pending.read()
        now_s = time.monotonic()
        counts = (tokens >= 0).sum(axis=1)
        num_drafts = [0] * len(counts)
        if self.speculation is not None:
            num_drafts = self.speculation.verified(step.plan, counts.tolist())
        if self.observers.is_on:
            self.observers.read(step, tokens, now_s, num_drafts)
        failures = advance_all(step.rows, tokens, counts)
        self._patience_s = time.monotonic() + PATIENCE_S
        self.admission.append(step.rows, tokens, counts)
        logprobs = step.logprobs(tokens, counts.tolist())
        step.take_prompts()
        for tracked, row_tokens, count, row_logprobs, drafted in zip(
            step.rows, tokens.tolist(), counts.tolist(), logprobs, num_drafts, strict=True
        ):
            if tracked.finished:
                continue
            self.current_requests = [tracked]
            del row_tokens[count:]
            if tracked.constraint is not None:
                failure = failures.get(id(tracked))
                if failure is not None:
                    self.end(tracked, "error", failure)
                    continue
                if tracked.is_late:
                    self.late.append(tracked)
            event = record_tokens(tracked, row_tokens, now_s, row_logprobs)
            if self.speculation is not None:
                self.speculation.learn(tracked, drafted, count)
            if tracked.finished:
                _finish(self, tracked, event)
            elif event.token_ids:
                tracked.ticket.put(event)
                self.awaits_stop_texts = self.awaits_stop_texts or tracked.ends_by_text
        self.current_requests = None
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
        self, tracked: RequestState, reason: FinishReason, error: EnginebayError | None = None
    ) -> None:
        """End a request before its output is complete."""
        tracked.finished = True
        tracked.metrics.finished_s = time.monotonic()
        _finish(self, tracked, TokenEvent((), reason, tracked.metrics, error))

    def restart(self) -> None:
        """Replace the engine's arrays after a failure. Running requests lose their rows and are
        queued again.
        """
        self.current_requests = None
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

    def _launch_prefill(self, decision: Decision, beside: Sequence[RequestState]) -> bool:
        """Launch a step with the chunks that can run now and the decoding rows `beside` them; then
        a step with completions whose prompt is in the cache after the first step.

        Other completions are held back, unless nothing at all would be launched: no scheduler can
        stall the loop.
        """
        find = self.requests.find
        asked = [(t, num) for r, num in decision.prefill if (t := find(r)) is not None]
        left = [(t, num) for t, num in asked if not t.is_late]
        demand = self.requests.demand()
        launched = False
        for hold in (True, True, False):
            if launched and not hold:
                break
            if not self.config.overlap_execution:
                self.commit_all()
            chunks, left = self.admission.admit_chunks(left, hold=hold)
            plans = tuple(_plan_chunk(self.admission, *chunk) for chunk in chunks)
            if plans:
                others = () if launched else beside
                decodes = [_plan_decode(t, t.max_steps(1), decodes=True) for t in others]
                rows = [*others, *(tracked for tracked, _ in chunks)]
                _launch_step(self, StepPlan((*decodes, *plans), 0, demand), rows)
                launched = True
            for tracked, _ in chunks:
                self.admission.set_computed(tracked, tracked.num_computed)
        return launched

    def _reserve(self, decision: Decision) -> tuple[int, list[RequestState]]:
        """The number of decode steps, and the rows for which cache could be reserved."""
        running = self.requests.running
        found = [t for r in decision.decode if (t := running.get(r)) and t.num_new_left > 0]
        chosen = [t for t in found if t.constraint is None or not must_wait(t)]
        if (drafting := self._drafting) is not None:
            chosen = [t for t in chosen if not drafting.waits(t)]
        most = max([t.num_new_left for t in chosen], default=0)
        steps = min(decision.decode_steps, self.config.decode_steps, most)
        if chosen and steps < 1:
            raise InternalError(
                f"the scheduler decodes {decision.decode_steps} steps, not 1 or more"
            )
        if any(t.request.sampling.returns_all for t in chosen):
            steps = 1  # [vocab] values per token would need much memory
        reserve = self.admission.reserve
        able = [t for t in chosen if reserve(t, t.num_tokens - 1 + t.max_steps(steps))]
        return steps, able

    def _launch_decode(self, rows: Sequence[RequestState], steps: int) -> bool:
        """Launch decoding rows: first rows with drafts, then guided rows, whose tokens are read
        while the others run, then the others.
        """
        verified = False
        if (drafting := self._drafting) is not None:
            rows, verified = _launch_verify(self, drafting, rows)
            steps = drafting.fewer_steps(rows, steps)
        guided = [t for t in rows if t.constraint is not None] if steps > 1 else []
        if guided:
            _launch_rows(self, guided, 1)
            if not self.config.overlap_execution:
                self.commit_all()
            rows = [t for t in rows if t.constraint is None]
        return _launch_rows(self, rows, steps) or bool(guided) or verified


def _plan_chunk(admission: Admission, tracked: RequestState, num_tokens: int) -> RowPlan:
    lease, start = tracked.row_lease, tracked.num_computed
    count = min(num_tokens, admission.chunk_end(tracked) - start)
    if count < 1:
        left = tracked.num_prefill - start
        raise InternalError(
            f"the scheduler prefills {num_tokens} tokens of a request with {left} left, not 1 or "
            "more of each"
        )
    tracked.num_computed += count
    is_last = tracked.num_computed == tracked.num_prefill
    tracked.num_launched += is_last
    pooling = tracked.request.pooling
    samples = is_last and pooling is None
    pools = pooling == "mean" or (is_last and pooling == "last")
    if not admission.reserve(tracked, tracked.num_computed):
        raise InternalError(
            f"the scheduler promised {tracked.num_computed} tokens of cache that are not free"
        )
    mask = next_mask(tracked) if samples else ()
    asks = tracked.returns_prompt
    return RowPlan(lease.row, lease, start, count, samples, mask, returns_prompt=asks, pools=pools)


def _finish(steps: StepRunner, tracked: RequestState, last: TokenEvent) -> None:
    """Remove an ended request and free its row. Its reader gets the last event even when an
    observer or a ledger raises.
    """
    try:
        steps.requests.drop(tracked)
        steps.admission.free(tracked)
    finally:
        try:
            if steps.observers.is_on and last.finish_reason:
                steps.observers.ended(tracked, last.finish_reason)
        finally:
            tracked.ticket.put(last)


def _plan_decode(
    tracked: RequestState, num_new: int, drafts: tuple[int, ...] = (), *, decodes: bool = False
) -> RowPlan:
    """The plan of a row that gets up to `num_new` tokens."""
    lease, start, mask = tracked.row_lease, tracked.num_tokens - 1, next_mask(tracked)
    tracked.num_launched += num_new
    return RowPlan(
        lease.row,
        lease,
        start,
        1,
        samples=True,
        update=mask,
        decodes=decodes,
        draft_token_ids=drafts,
    )


def _launch_rows(steps: StepRunner, rows: Sequence[RequestState], num_steps: int) -> bool:
    plans = tuple([_plan_decode(t, t.max_steps(num_steps)) for t in rows])
    if plans:
        _launch_step(steps, StepPlan(plans, num_steps, steps.requests.demand()), list(rows))
    return bool(plans)


def _launch_verify(
    steps: StepRunner, speculation: Speculation, rows: Sequence[RequestState]
) -> tuple[list[RequestState], bool]:
    """Launch a verify step of the rows that have drafts and cache for them. Returns the other rows,
    and whether a step was launched.

    This step is launched first because it is then read first, and its rows wait for it.
    """
    others: list[RequestState] = []
    plans: list[RowPlan] = []
    chosen: list[RequestState] = []
    for tracked in rows:
        steps.current_requests = [tracked]
        drafts = speculation.drafts(tracked)
        steps.current_requests = None
        reserve = steps.admission.reserve
        has_room = bool(drafts) and reserve(tracked, tracked.num_tokens + len(drafts))
        if not has_room and len(drafts) > speculation.most:
            drafts = drafts[: speculation.most]  # the drafts of one pass
            has_room = reserve(tracked, tracked.num_tokens + len(drafts))
        if not has_room:
            others.append(tracked)
            continue
        plans.append(_plan_decode(tracked, len(drafts) + 1, drafts))
        chosen.append(tracked)
    if plans:
        most = max(len(plan.draft_token_ids) for plan in plans)
        _launch_step(steps, StepPlan(tuple(plans), most + 1, steps.requests.demand()), chosen)
        if not steps.config.overlap_execution:
            steps.commit_all()
    return others, bool(plans)


def _launch_step(steps: StepRunner, plan: StepPlan, rows: list[RequestState]) -> None:
    steps.current_requests = rows
    pending = steps.engine.step(plan)
    launched_s = steps.observers.launched(plan) if steps.observers.is_on else math.nan
    steps.in_flight.append(InFlight(pending, plan, rows, launched_s))
    steps.current_requests = None
