"""The state of each unfinished request, and the views of it that a scheduler gets."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import numpy as np

from enginebay.contracts.cache import Lease
from enginebay.contracts.engine import Demand, TokenLogprobs
from enginebay.contracts.scheduler import Limits, RunningView, SchedulerView, WaitingView
from enginebay.grammar import Constraint
from enginebay.outputs import RequestMetrics
from enginebay.serving.draft_stats import DraftStats
from enginebay.serving.messages import Ticket, TokenEvent
from enginebay.serving.prompt_values import PromptParts, joined_logprobs, pooled_hidden
from enginebay.text.stopping import end_of_match
from enginebay.types import FinishReason, Request

MAX_LOOKED_UP = 256
"""A view counts cached tokens of at most this many waiting requests."""


@dataclasses.dataclass(eq=False, slots=True)
class RequestState:
    """A request from its submission to its last event. Its launched counts are ahead of its
    committed output.
    """

    ticket: Ticket
    metrics: RequestMetrics
    lease: Lease | None = None
    num_prefill: int = 0
    """Tokens to prefill: the prompt, and after a preemption also the output before it."""
    num_computed: int = 0
    """Tokens to prefill that were launched."""
    num_launched: int = 0
    """Upper bound of the output tokens that launched steps have produced."""
    output: list[int] = dataclasses.field(default_factory=list)
    finished: bool = False
    draft_stats: DraftStats = dataclasses.field(default_factory=DraftStats)
    """Whether drafting its tokens has paid."""
    # From the request, and read for every row of every step.
    request: Request = dataclasses.field(init=False)
    num_prompt: int = dataclasses.field(init=False)
    num_total: int = dataclasses.field(init=False)
    """The largest number of tokens, prompt and output, that the request can need."""
    num_logprobs: int | None = dataclasses.field(init=False)
    """Number of best tokens whose log-probabilities are returned with each new token; None: no
    log-probabilities.
    """
    ends_by_text: bool = dataclasses.field(init=False)
    """Whether the reader of its tokens may find a stop text and abort it."""
    constraint: Constraint | None = dataclasses.field(init=False)
    """The position of the committed output in the request's grammar; None: no grammar."""
    is_scored: bool = False
    """Whether the whole prompt of a request that generates nothing was computed and read."""
    is_late: bool = False
    """Whether the mask after its output is still being computed. Until it is there, the row is not
    launched, and it is not known whether the text ends here.
    """
    prompt: PromptParts[TokenLogprobs] | None = dataclasses.field(init=False)
    """Collects the prompt's log-probabilities; None: they were not requested."""
    hidden: PromptParts[tuple[np.ndarray, np.ndarray]] | None = dataclasses.field(init=False)
    """Collects the prompt's hidden states, which the request returns instead of new tokens; None:
    the request generates.
    """

    def __post_init__(self) -> None:
        self.request = request = self.ticket.request
        self.constraint = None if request.grammar is None else request.grammar.start()
        self.num_prompt = len(request.prompt_token_ids)
        max_new = request.sampling.max_tokens if request.generates else 0
        self.num_total = self.num_prompt + max_new
        self.num_logprobs = request.sampling.num_logprobs
        self.ends_by_text = self.ticket.is_delivered and bool(request.sampling.params.stop)
        has_logprobs = request.sampling.num_prompt_logprobs is not None
        self.prompt = PromptParts(self.num_prompt - 1) if has_logprobs else None
        self.hidden = None if request.pooling is None else PromptParts(self.num_prompt)

    @property
    def row_lease(self) -> Lease:
        """The lease of a running request."""
        assert self.lease is not None, "running requests have a lease"
        return self.lease

    @property
    def returns_prompt(self) -> bool:
        """Whether log-probabilities of the prompt were requested and are incomplete."""
        return self.prompt is not None and not self.prompt.is_complete

    @property
    def tokens_to_prefill(self) -> np.ndarray:
        """int32 [num_prefill], of a waiting request: the prompt, and the output before a
        preemption.
        """
        prompt = self.request.prompt_token_ids
        return np.concatenate([prompt, np.asarray(self.output, prompt.dtype)])

    @property
    def needs_every_token(self) -> bool:
        """Whether the whole prompt must be computed, even tokens that are in the cache."""
        return self.returns_prompt or self.request.pooling == "mean"

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the launched output."""
        return self.num_prompt + self.num_launched

    @property
    def num_new_left(self) -> int:
        """Output tokens that may still be launched."""
        left = self.num_total - self.num_prompt - self.num_launched
        return left if left > 0 else 0  # noqa: FURB136  # max() costs each row of each step more

    def max_steps(self, steps: int) -> int:
        """How many of `steps` decode steps it can run in one call: a guided request needs a new
        mask after each step.
        """
        if self.constraint is not None:
            steps = 1
        left = self.num_new_left
        return steps if steps < left else left  # noqa: FURB136  # runs for every row of every step

    @property
    def num_shareable(self) -> int:
        """Tokens that need not be computed when another completion of the same prompt has them in
        the cache.
        """
        return 0 if self.needs_every_token else min(self.num_prompt, self.num_prefill - 1)

    def finish_reason(self) -> FinishReason | None:
        """Why the committed output ends here, or None."""
        sampling = self.request.sampling
        if self.output and self.output[-1] in sampling.stop_token_ids:
            return "stop"
        if self.is_late:
            return None
        if self.constraint is not None and self.constraint.is_done:
            return "stop"
        return "length" if len(self.output) >= sampling.max_tokens else None

    def record(
        self, new: list[int], now_s: float, logprobs: TokenLogprobs | None = None
    ) -> TokenEvent:
        """Append committed tokens to the output, and return the event for its reader. Sets
        `finished` when the event is the last.

        Tokens after a stop sequence are dropped.
        """
        sampling = self.request.sampling
        before = len(self.output)
        self.output += new
        end = None
        if sampling.params.stop_words_ids:
            start = max(before, sampling.min_tokens)
            end = end_of_match(self.output, sampling.params.stop_words_ids, start)
        if end is not None:
            del self.output[end:], new[end - before :]
        metrics = self.metrics
        if new and not before:
            metrics.first_token_s = now_s
        metrics.num_generated_tokens = len(self.output)
        hidden = logprobs_of_prompt = None
        if self.hidden is not None:
            parts = self.hidden.take()
            hidden = pooled_hidden(parts, self.num_prompt, self.request.pooling)
        reason = (self.finish_reason() if end is None else "stop") if new else None
        if hidden is not None:
            reason = "stop"
        elif self.is_scored:
            reason = "length"
        if reason:
            metrics.finished_s = now_s
            self.finished = True
        if self.prompt is not None and (new or self.is_scored):
            logprobs_of_prompt = joined_logprobs(self.prompt.take(), sampling.num_prompt_logprobs)
        return TokenEvent(
            token_ids=tuple(new),
            finish_reason=reason,
            metrics=metrics,
            error=None,
            logprobs=logprobs,
            prompt_logprobs=logprobs_of_prompt,
            hidden=hidden,
        )


class RequestTable:
    """All unfinished requests: waiting ones in their order, running ones by id."""

    def __init__(self) -> None:
        self.waiting: dict[str, RequestState] = {}
        self.running: dict[str, RequestState] = {}

    def add(self, ticket: Ticket) -> RequestState:
        """Add a new request at the end of the queue."""
        request = ticket.request
        metrics = RequestMetrics(
            arrival_s=request.arrival_s, num_prompt_tokens=len(request.prompt_token_ids)
        )
        tracked = RequestState(ticket, metrics, num_prefill=len(request.prompt_token_ids))
        self.waiting[request.request_id] = tracked
        return tracked

    def find(self, request_id: str) -> RequestState | None:
        """The unfinished request with this id, or None."""
        return self.running.get(request_id) or self.waiting.get(request_id)

    def drop(self, tracked: RequestState) -> None:
        """Remove a request that has ended."""
        request_id = tracked.request.request_id
        self.running.pop(request_id, None)
        self.waiting.pop(request_id, None)

    def requeue(self, tracked: RequestState) -> None:
        """Put a preempted request at the front of the queue. Its output so far is prefilled again
        with the prompt.
        """
        self.running.pop(tracked.request.request_id)
        tracked.lease = None
        tracked.num_prefill = len(tracked.request.prompt_token_ids) + len(tracked.output)
        tracked.num_computed = 0
        tracked.num_launched = len(tracked.output)
        if tracked.prompt is not None:
            tracked.prompt.restart()
        if tracked.hidden is not None:
            tracked.hidden.restart()
        self.waiting = {tracked.request.request_id: tracked} | self.waiting

    def heads(self) -> dict[str, RequestState]:
        """By parent id, a running completion whose whole prompt was launched: other completions of
        the prompt can share it.
        """
        return {
            t.request.parent_id: t
            for t in self.running.values()
            if t.num_computed >= t.num_prompt and t.request.parent_id
        }

    def begun(self) -> set[str]:
        """Parent ids that have a running completion."""
        return {t.request.parent_id for t in self.running.values() if t.request.parent_id}

    def adapter_counts(self) -> tuple[Counter[str], Counter[str]]:
        """Number of (waiting, running) completions by key of their adapter. Any thread may call
        this.
        """
        each = (list(states.values()) for states in (self.waiting, self.running))
        waiting, running = (Counter(one.request.adapter for one in states) for states in each)
        return waiting, running

    @property
    def is_empty(self) -> bool:
        """Whether there is no unfinished request."""
        return not (self.running or self.waiting)

    @property
    def everything(self) -> list[RequestState]:
        """All requests: running ones, then waiting ones."""
        return [*self.running.values(), *self.waiting.values()]

    def demand(self) -> Demand:
        """The number of unfinished requests, and the most tokens that one of them may need."""
        totals = [t.num_total for each in (self.running, self.waiting) for t in each.values()]
        return Demand(len(totals), max(totals, default=0))

    def view(
        self,
        now_s: float,
        limits: Limits,
        num_cached: Callable[[RequestState], int] | None = None,
        *,
        forks: bool = False,
    ) -> SchedulerView:
        """The view for a scheduler decision.

        `num_cached` returns how many of a request's first tokens are in the cache. It is called for
        the first MAX_LOOKED_UP waiting requests only, because it hashes each of their pages. With
        `forks`, tokens that another completion of the prompt has computed count as cached too.
        """
        heads = self.heads() if forks and self.waiting else {}

        def shared(one: RequestState) -> int:
            return one.num_shareable if one.request.parent_id in heads else 0

        def cached(place: int, one: RequestState) -> int:
            if num_cached is None or place >= MAX_LOOKED_UP or one.needs_every_token:
                return shared(one)
            return max(shared(one), num_cached(one))

        waiting = [
            WaitingView(
                request_id=r,
                num_prompt_tokens=t.num_prefill,
                max_new_tokens=t.num_new_left,
                arrival_s=t.request.arrival_s,
                priority=t.request.priority,
                num_cached_tokens=cached(place, t),
                tenant=t.request.tenant,
                num_shared_tokens=shared(t),
            )
            for place, (r, t) in enumerate(self.waiting.items())
        ]
        running = [
            RunningView(
                request_id=r,
                num_tokens=t.num_tokens,
                num_left=t.num_prefill - t.num_computed,
                max_new_left=t.num_new_left,
                arrival_s=t.request.arrival_s,
                priority=t.request.priority,
                num_promised=t.lease.capacity if t.lease is not None else None,
                tenant=t.request.tenant,
            )
            for r, t in self.running.items()
        ]
        num_streaming = sum([t.request.streams for t in self.running.values()])
        return SchedulerView(now_s, tuple(waiting), tuple(running), limits, num_streaming)
