"""What the loop remembers of each request, and the views of it that a scheduler gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from enginebay.cache import Lease
from enginebay.engine import Demand, TokenLogprobs
from enginebay.grammar import Constraint
from enginebay.loop.draft_stats import DraftStats
from enginebay.loop.messages import Ticket, TokenEvent
from enginebay.loop.prompt import PromptHidden, PromptLogprobs
from enginebay.outputs import RequestMetrics
from enginebay.scheduler import Limits, RunningView, SchedulerView, WaitingView
from enginebay.stopping import end_of_match
from enginebay.types import FinishReason, Request

MAX_LOOKED_UP = 256
"""Waiting requests whose cached tokens a view counts."""


@dataclasses.dataclass(eq=False, slots=True)
class RequestState:
    """A request from submission to its last event. Launched counts run ahead of committed ones."""

    ticket: Ticket
    metrics: RequestMetrics
    lease: Lease | None = None
    num_prefill: int = 0
    """Tokens to prefill: the prompt, and after a preemption the tokens generated before it."""
    num_computed: int = 0
    """Of those, how many were launched."""
    num_launched: int = 0
    """Output tokens that launched steps may have produced, an upper bound."""
    output: list[int] = dataclasses.field(default_factory=list)
    finished: bool = False
    draft_stats: DraftStats = dataclasses.field(default_factory=DraftStats)
    """Whether drafting its tokens has paid."""
    # Of what was asked, and looked up for every row of every step.
    request: Request = dataclasses.field(init=False)
    num_prompt: int = dataclasses.field(init=False)
    num_total: int = dataclasses.field(init=False)
    """Tokens that the request can need at most."""
    num_logprobs: int | None = dataclasses.field(init=False)
    """Best tokens whose log-probabilities are told with each new one's; None: nothing is told."""
    ends_by_text: bool = dataclasses.field(init=False)
    """Whether the reader of its tokens may find a stop text in them, and abort it."""
    constraint: Constraint | None = dataclasses.field(init=False)
    """How far the committed output has come in the request's grammar, if it has one."""
    is_late: bool = False
    """Whether the mask behind its output is still being computed: the row is not launched, and
    whether the text ends here is not known.
    """
    prompt: PromptLogprobs | None = dataclasses.field(init=False)
    """What is told of the prompt; None: nothing."""
    hidden: PromptHidden | None = dataclasses.field(init=False)
    """The prompt's hidden states, in place of new tokens; None: it generates."""

    def __post_init__(self) -> None:
        self.request = request = self.ticket.request
        self.constraint = None if request.grammar is None else request.grammar.start()
        self.num_prompt = len(request.prompt_token_ids)
        self.num_total = self.num_prompt + request.sampling.max_tokens
        self.num_logprobs = request.sampling.num_logprobs
        self.ends_by_text = self.ticket.is_delivered and bool(request.sampling.params.stop)
        num_best = request.sampling.num_prompt_logprobs
        self.prompt = None if num_best is None else PromptLogprobs(self.num_prompt, num_best)
        pooling = request.pooling
        self.hidden = None if pooling is None else PromptHidden(self.num_prompt, pooling)

    @property
    def returns_prompt(self) -> bool:
        """Whether the request still waits for values of its prompt's tokens."""
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
        """Whether its prompt is computed from the first token on, whatever the cache has of it."""
        return self.returns_prompt or (self.hidden is not None and self.hidden.needs(last=False))

    @property
    def num_tokens(self) -> int:
        """Prompt and launched output."""
        return self.num_prompt + self.num_launched

    @property
    def num_new_left(self) -> int:
        """Output tokens that may still be launched."""
        return self.num_total - self.num_prompt - self.num_launched

    def max_steps(self, steps: int) -> int:
        """Of so many decode steps, those that it can run in one call: a guided request needs a new
        mask after each.
        """
        if self.constraint is not None:
            steps = 1
        left = self.num_new_left
        return steps if steps < left else left  # noqa: FURB136  # runs for every row of every step

    @property
    def num_shareable(self) -> int:
        """Tokens that need not be computed when another completion of the prompt has it in the
        cache.
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


class RequestTable:
    """All unfinished requests: waiting ones in order, running ones by id."""

    def __init__(self) -> None:
        self.waiting: dict[str, RequestState] = {}
        self.running: dict[str, RequestState] = {}

    def add(self, ticket: Ticket) -> RequestState:
        """A new request, at the end of the queue."""
        request = ticket.request
        metrics = RequestMetrics(
            arrival_s=request.arrival_s, num_prompt_tokens=len(request.prompt_token_ids)
        )
        tracked = RequestState(ticket, metrics, num_prefill=len(request.prompt_token_ids))
        self.waiting[request.request_id] = tracked
        return tracked

    def find(self, request_id: str) -> RequestState | None:
        """The unfinished request of this id."""
        return self.running.get(request_id) or self.waiting.get(request_id)

    def forget(self, ticket: Ticket) -> None:
        """Drop the request of a ticket, if it is here."""
        tracked = self.find(ticket.request.request_id)
        if tracked is not None and tracked.ticket is ticket:
            self.drop(tracked)

    def drop(self, tracked: RequestState) -> None:
        """Forget a request that has ended."""
        request_id = tracked.request.request_id
        self.running.pop(request_id, None)
        self.waiting.pop(request_id, None)

    def requeue(self, tracked: RequestState) -> None:
        """Put a preempted request at the front of the queue; its output so far is prefilled
        again.
        """
        self.running.pop(tracked.request.request_id)
        tracked.lease = None
        tracked.num_prefill = len(tracked.request.prompt_token_ids) + len(tracked.output)
        tracked.num_computed = 0
        tracked.num_launched = len(tracked.output)
        if tracked.prompt is not None:
            tracked.prompt.begin_anew()
        if tracked.hidden is not None:
            tracked.hidden.begin_anew()
        self.waiting = {tracked.request.request_id: tracked} | self.waiting

    def clear(self) -> None:
        """Forget all requests."""
        self.waiting.clear()
        self.running.clear()

    def heads(self) -> dict[str, RequestState]:
        """By parent, a running completion whose prompt is launched to its end: the others of the
        prompt can share it.
        """
        return {p: t for p, t in self._families() if t.num_computed >= t.num_prompt}

    def begun(self) -> set[str]:
        """The parents of which a completion runs."""
        return {p for p, _ in self._families()}

    def _families(self) -> Iterator[tuple[str, RequestState]]:
        return ((t.request.parent_id, t) for t in self.running.values() if t.request.parent_id)

    @property
    def is_empty(self) -> bool:
        """Whether there is no unfinished request."""
        return not (self.running or self.waiting)

    @property
    def everything(self) -> list[RequestState]:
        """Running and waiting."""
        return [*self.running.values(), *self.waiting.values()]

    def demand(self) -> Demand:
        """What all of them may need together."""
        totals = [t.num_total for t in self.everything]
        return Demand(len(totals), max(totals, default=0))

    def view(
        self,
        now_s: float,
        limits: Limits,
        num_cached: Callable[[RequestState], int] | None = None,
        *,
        forks: bool = False,
    ) -> SchedulerView:
        """What the scheduler sees. `num_cached` tells how many of a request's first tokens the
        cache has; it is asked for the MAX_LOOKED_UP requests that wait longest, because that takes
        a hash of each of their pages. With `forks`, what another completion of a prompt has
        computed counts too.
        """
        heads = self.heads() if forks else {}

        def shared(one: RequestState) -> int:
            return one.num_shareable if one.request.parent_id in heads else 0

        def cached(place: int, one: RequestState) -> int:
            if num_cached is None or place >= MAX_LOOKED_UP or one.needs_every_token:
                return shared(one)
            return max(shared(one), num_cached(one))

        waiting = tuple(
            WaitingView(
                r,
                t.num_prefill,
                t.num_new_left,
                t.request.arrival_s,
                t.request.priority,
                cached(place, t),
                t.request.tenant,
                shared(t),
            )
            for place, (r, t) in enumerate(self.waiting.items())
        )
        running = tuple(
            RunningView(
                r,
                t.num_tokens,
                t.num_prefill - t.num_computed,
                t.num_new_left,
                t.request.arrival_s,
                t.request.priority,
                t.lease.capacity if t.lease is not None else None,
                t.request.tenant,
            )
            for r, t in self.running.items()
        )
        num_streaming = sum([t.request.streams for t in self.running.values()])
        return SchedulerView(now_s, waiting, running, limits, num_streaming)


def record_tokens(
    tracked: RequestState, new: list[int], now_s: float, logprobs: TokenLogprobs | None = None
) -> TokenEvent:
    """Append committed tokens, and return the event that tells them; sets `finished` when it is the
    last.

    Tokens behind a stop sequence are dropped.
    """
    sampling = tracked.request.sampling
    before = len(tracked.output)
    tracked.output += new
    end = None
    if sampling.params.stop_words_ids:
        start = max(before, sampling.min_tokens)
        end = end_of_match(tracked.output, sampling.params.stop_words_ids, start)
    if end is not None:
        del tracked.output[end:], new[end - before :]
    metrics = tracked.metrics
    if new and not before:
        metrics.first_token_s = now_s
    metrics.num_generated_tokens = len(tracked.output)
    hidden = None if tracked.hidden is None else tracked.hidden.result()
    reason = (tracked.finish_reason() if end is None else "stop") if new else None
    if hidden is not None:
        reason = "stop"
    if reason:
        metrics.finished_s = now_s
        tracked.finished = True
    prompt_logprobs = None if tracked.prompt is None else tracked.prompt.take()
    return TokenEvent(tuple(new), reason, metrics, None, logprobs, prompt_logprobs, hidden)
