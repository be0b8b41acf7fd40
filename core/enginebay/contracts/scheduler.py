"""The scheduler contract: a scheduler decides which requests run next. It sees numbers of tokens,
never arrays, and does not import JAX.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class WaitingView:
    """A request that waits for a row. Requests are listed in order of arrival, preempted ones
    first.
    """

    request_id: str
    num_prompt_tokens: int
    """Tokens to prefill. After a preemption they include the tokens generated so far."""
    max_new_tokens: int
    arrival_s: float
    priority: int = 0
    """A request with a larger number is more urgent."""
    num_cached_tokens: int = 0
    """How many of the first tokens to prefill are in the cache, as far as is known before
    admission.
    """
    tenant: str = ""
    """Tenant that the request is charged to; "" is an ordinary tenant."""
    num_shared_tokens: int = 0
    """How many of the first tokens to prefill are in the cache of another completion of the same
    prompt. They use no free_tokens, except for the rest of a page that is not full.
    """

    @property
    def num_left(self) -> int:
        """Number of tokens to process, at least 1: the last token of a prompt is always processed,
        because it gives the first logits.
        """
        return max(1, self.num_prompt_tokens - self.num_cached_tokens)


# Not frozen, for speed: one is made for every row of every step.
@dataclasses.dataclass(slots=True, unsafe_hash=True)
class RunningView:
    """A request that holds a row. It is not changed after it was made.

    `num_left`: prompt tokens that are not prefilled yet; 0 means that the request decodes.
    `max_new_left`: new tokens that are not launched yet. When both are 0, the request ends and
    frees its row and cache as soon as its last step is read.
    """

    request_id: str
    num_tokens: int
    """Tokens of prompt and output so far, including launched steps that were not read yet."""
    num_left: int
    max_new_left: int
    arrival_s: float
    priority: int = 0
    num_promised: int | None = None
    """Tokens of cache promised so far; None when the promise covers all tokens that the request can
    need, so that it uses no more free_tokens.
    """
    tenant: str = ""

    def growth(self, num_steps: int) -> int:
        """Return how many more tokens of cache a decoding row needs before it can run this many
        steps.

        The row's last token needs no cache until the step that processes it.
        """
        if self.num_promised is None:
            return 0
        # This runs for every row of every step, in half the time without min and max.
        steps = num_steps if num_steps < self.max_new_left else self.max_new_left  # noqa: FURB136
        missing = self.num_tokens - 1 + steps - self.num_promised
        return missing if missing > 0 else 0  # noqa: FURB136


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Limits for one decision. `free_tokens` is the cache space that is not promised yet, in
    tokens. -1: no row could go on with the last decision, because the cache has no room for its
    rows although the view had. The loop carries out only the preemptions of a decision for such
    limits, and keeps the state from before; when it preempts no row, the loop preempts the latest
    arrival.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_decode_steps: int
    free_rows: int
    free_tokens: int
    stream_chunk_tokens: int = 1
    """Decode steps of one decision while few running requests stream."""


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerView:
    """Everything that a decision may depend on, except for the scheduler's own state."""

    now_s: float
    waiting: tuple[WaitingView, ...]
    running: tuple[RunningView, ...]
    limits: Limits
    num_streaming: int = 0
    """Running requests whose tokens are sent as they are made. Each decision that decodes gives
    such a request one chunk, so many decode steps make its stream uneven.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What runs next, in this order: `preempt`, then `prefill`, then `decode`.

    `prefill` has pairs (request id, number of prompt tokens to process now); naming a waiting
    request admits it. Each request in `decode` gets up to `decode_steps` tokens, and at most its
    max_new_left. `preempt` lists running requests that lose their rows and wait again. An empty
    decision means: wait until a request arrives or a step ends.
    """

    prefill: tuple[tuple[str, int], ...] = ()
    decode: tuple[str, ...] = ()
    decode_steps: int = 1
    preempt: tuple[str, ...] = ()


class Scheduler(ABC):
    """Decides what runs next. A decision is a pure function of view and state.

    Invariants (tested by the conformance suite):

    - The same view and state give the same decision.
    - The prefilled tokens, plus one token per decoding request, are at most max_num_batched_tokens.
    - The decision admits at most as many requests as there are free rows and rows that it preempts.
    - The tokens of cache that the decision needs are at most free_tokens plus the tokens of the
      rows that it preempts. An admitted request needs its prompt and one more token; a decoding row
      needs the tokens by which it grows.
    - Every request id in the decision is in the view, and occurs once.
    - A request decodes only when its num_left is 0 and its max_new_left is at least 1. The loop
      leaves a row that has its last token out of the step, but the row has used up a token of the
      budget. A prefill has at least 1 and at most num_left tokens.
    - The decision is not empty while a waiting or running request could run.
    - No request waits for ever, whichever requests arrive later.
    - The state is hashable, and has no record of requests that are gone.
    """

    needs_cached_tokens: bool = False
    """Whether the scheduler reads num_cached_tokens of waiting requests. If not, the loop does not
    compute this number. If so, the loop computes it for the first waiting requests only.
    """

    @abstractmethod
    def initial_state(self) -> Any:
        """Return the state before the first decision; immutable."""

    @abstractmethod
    def decide(self, view: SchedulerView, state: Any) -> tuple[Decision, Any]:
        """Return the next decision and the new state."""
