"""Running: the host's state of one completion, with the DraftStats that say whether drafting its
tokens has paid so far. TokenEvent: what its reader gets.
"""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Callable

import numpy as np

from enginebay.contracts.cache import Lease
from enginebay.contracts.engine import TokenLogprobs
from enginebay.errors import EnginebayError
from enginebay.grammar import Constraint
from enginebay.outputs import RequestMetrics
from enginebay.serving.prompt_values import PromptParts, joined_logprobs, pooled_hidden
from enginebay.text.stopping import end_of_match
from enginebay.types import FinishReason, Request


# Not frozen, for the same reason as a RowPlan.
@dataclasses.dataclass(slots=True)
class TokenEvent:
    """New tokens of a request. The last event has a finish reason, and an error when the reason is
    "error".

    `logprobs`, for requests with log-probabilities, is [tokens or more, W]: W is the requested
    number of best tokens plus one. `prompt_logprobs`, [prompt tokens - 1, W], comes once, with the
    first token. `hidden`, f32 [hidden_size], comes with the last event of a request with a
    `pooling`.

    `metrics` belong to the engine thread until the last event: a reader that ends a request earlier
    takes a copy.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    metrics: RequestMetrics | None = None
    error: EnginebayError | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    hidden: np.ndarray | None = None


Wake = Callable[[], None]
TakeEvent = Callable[[TokenEvent], Wake | None]
"""Receives the next event of a request. Returns the function that wakes the request's reader, or
None when there is nothing new to read.
"""


MIN_ACCEPTED_SHARE = 0.3
"""The share of drafts that must be accepted. A verify step costs more than a decode step, and its
tokens must be read before the next step is launched.
"""

PROPOSAL_WEIGHT = 0.5
"""The weight of the last proposal, when it filled at least one pass of the model."""

EMPTY_WEIGHT = 0.125
"""The weight of an empty proposal: it cost no verify step, only the wait for the row's last
token.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class DraftStats:
    """A moving average of the share of drafts that were accepted.

    It starts above MIN_ACCEPTED_SHARE, so every row begins with drafting. While it is below, or
    when nothing is proposed, the row decodes without drafts; the tokens that it decodes then show
    how many drafts would have been accepted, until the share is large enough again.
    """

    share: float = 0.5

    @property
    def is_good(self) -> bool:
        """Whether to draft the row's next tokens."""
        return self.share >= MIN_ACCEPTED_SHARE

    def after(self, num_held: int, num_asked: int, most: int) -> DraftStats:
        """The stats after `num_held` of `num_asked` requested drafts were accepted; one pass of the
        model verifies at most `most` drafts.
        """
        weight = PROPOSAL_WEIGHT * min(1.0, num_asked / most)
        return DraftStats(self.share + weight * (num_held / num_asked - self.share))

    def after_none(self) -> DraftStats:
        """The stats after the proposer has proposed nothing."""
        return DraftStats(self.share * (1 - EMPTY_WEIGHT))


class Running:
    """One completion, from its submission to its last event, also while it waits for a row. Belongs
    to the engine thread, except get() and get_nowait(). Its launched counts are ahead of its
    committed output.
    """

    def __init__(
        self,
        request: Request,
        take: TakeEvent | None = None,
        due: list[tuple[Running, TokenEvent]] | None = None,
    ) -> None:
        """`take` receives its events on the delivery thread, which finds them in `due`. None: they
        wait in an unbounded queue, which get() reads.
        """
        sampling = request.sampling
        self.request, self.take, self._due = request, take, due
        self._events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        self.has_ended = False
        """Whether its last event was put."""
        self.finished = False
        self.num_prompt = len(request.prompt_token_ids)
        self.metrics = RequestMetrics(
            arrival_s=request.arrival_s, num_prompt_tokens=self.num_prompt
        )
        self.lease: Lease | None = None
        self.num_prefill = self.num_prompt
        """Tokens to prefill: the prompt, and after a preemption also the output before it."""
        self.num_computed = 0
        """Tokens to prefill that were launched."""
        self.num_launched = 0
        """Upper bound of the output tokens that launched steps have produced."""
        self.output: list[int] = []
        self.draft_stats = DraftStats()
        """Whether drafting its tokens has paid."""
        self.num_total = self.num_prompt + (0 if request.pooling else sampling.max_tokens)
        """The largest number of tokens, prompt and output, that the request can need."""
        self.num_logprobs = sampling.num_logprobs
        """Number of best tokens whose log-probabilities are returned with each new token; None: no
        log-probabilities.
        """
        self.ends_by_text = take is not None and bool(sampling.params.stop)
        """Whether the reader of its tokens may find a stop text and abort it."""
        self.constraint: Constraint | None = None
        """The position of the committed output in the request's grammar, from begin() on; None: no
        grammar.
        """
        self.is_scored = False
        """Whether the whole prompt of a request that generates nothing was computed and read."""
        self.is_late = False
        """Whether the mask after its output is still being computed. Until it is there, the row is
        not launched, and it is not known whether the text ends here.
        """
        has_logprobs = sampling.num_prompt_logprobs is not None
        self.prompt: PromptParts[TokenLogprobs] | None = (
            PromptParts(self.num_prompt - 1) if has_logprobs else None
        )
        """Collects the prompt's log-probabilities; None: they were not requested."""
        self.hidden: PromptParts[tuple[np.ndarray, np.ndarray]] | None = (
            None if request.pooling is None else PromptParts(self.num_prompt)
        )
        """Collects the prompt's hidden states, which the request returns instead of new tokens;
        None: the request generates.
        """

    def begin(self) -> None:
        """Start its grammar, when the engine thread queues it."""
        grammar = self.request.grammar
        self.constraint = None if grammar is None else grammar.start()

    def put(self, event: TokenEvent) -> None:
        """Add an event for its reader."""
        if event.finish_reason is not None:
            self.has_ended = True
        if self._due is None:
            self._events.put(event)
        else:
            self._due.append((self, event))

    def get(self, timeout_s: float | None = None) -> TokenEvent:
        """The next event; queue.Empty when none came within `timeout_s` seconds. Any thread may
        call this.
        """
        return self._events.get(timeout=timeout_s)

    def get_nowait(self) -> TokenEvent:
        """The next event; queue.Empty when there is none. Any thread may call this."""
        return self._events.get_nowait()

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
