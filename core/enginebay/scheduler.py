"""The scheduler contract: which tokens run next. Sees counts, never arrays, and does not import
JAX.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class WaitingView:
    """A request that holds no row yet. Waiting requests are listed in order of arrival, preempted
    ones first.
    """

    request_id: str
    num_prompt_tokens: int
    """Tokens to prefill; after a preemption the tokens generated so far are among them."""
    max_new_tokens: int
    arrival_s: float
    priority: int = 0
    """Larger is more urgent."""
    num_cached_tokens: int = 0
    """How many of the first tokens to prefill lie in the cache already, as far as is known before
    admission.
    """
    tenant: str = ""
    """On whose account it runs; "" is a tenant like any other."""
    num_shared_tokens: int = 0
    """How many of the first tokens to prefill another completion of the prompt holds: they take no
    free_tokens, but for what is left of a page.
    """

    @property
    def num_left(self) -> int:
        """Tokens to process. Of a prompt that is cached to its end the last one still runs: it
        gives the first logits.
        """
        return max(1, self.num_prompt_tokens - self.num_cached_tokens)


# Not frozen, for the same reason as a RowPlan.
@dataclasses.dataclass(slots=True, unsafe_hash=True)
class RunningView:
    """A request that holds a row. `num_left` counts prompt tokens not yet prefilled; 0 means that
    it decodes. Nobody changes it.

    With `max_new_left` 0 too, all its tokens are launched: it ends, and gives back what it holds,
    when they are read.
    """

    request_id: str
    num_tokens: int
    """Tokens so far, prompt and output, those of launched but unread steps included."""
    num_left: int
    max_new_left: int
    arrival_s: float
    priority: int = 0
    num_promised: int | None = None
    """Tokens of cache promised so far; None when all it can ever need is promised, so that it never
    takes free_tokens.
    """
    tenant: str = ""

    def growth(self, num_steps: int) -> int:
        """Tokens of cache still to be promised before a decoding row can run that many steps.

        The last of its tokens has no place in the cache until it runs.
        """
        if self.num_promised is None:
            return 0
        # This runs for every row of every step, in half the time without min and max.
        steps = num_steps if num_steps < self.max_new_left else self.max_new_left  # noqa: FURB136
        missing = self.num_tokens - 1 + steps - self.num_promised
        return missing if missing > 0 else 0  # noqa: FURB136


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What one decision may use. `free_tokens` is cache space that could still be promised."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_decode_steps: int
    free_rows: int
    free_tokens: int
    stream_chunk_tokens: int = 1
    """Decode steps of one decision while few running requests stream."""


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerView:
    """All that a decision may depend on, besides the scheduler's own state."""

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

    `prefill` pairs a request with the number of prompt tokens to process now; one that was waiting
    is admitted by being named. `decode` requests get up to `decode_steps` tokens each. Nothing in
    it means: wait for news.
    """

    prefill: tuple[tuple[str, int], ...] = ()
    decode: tuple[str, ...] = ()
    decode_steps: int = 1
    preempt: tuple[str, ...] = ()


class Scheduler(ABC):
    """Decides what runs next, as a pure function of view and state.

    Invariants (held by the conformance suite): the same view and state give the same decision;
    prefilled tokens plus one per decoding request stay within max_num_batched_tokens; admitted
    requests fit the rows that are free or preempted, and their prompts with a token more each,
    together with what the decoding rows grow by, the tokens; every named id is in the view and
    named once; a request is only decoded when num_left is 0; a prefill is at least 1 token and at
    most what is left; as long as something waits or runs and could run, the decision is not empty;
    nobody waits for ever, whoever comes after; the state is hashable and forgets requests that are
    gone.
    """

    needs_cached_tokens: bool = False
    """Whether it looks at num_cached_tokens of the first waiting requests: the loop looks them up
    only then.
    """

    @abstractmethod
    def initial_state(self) -> Any:
        """The state before the first decision; immutable."""

    @abstractmethod
    def decide(self, view: SchedulerView, state: Any) -> tuple[Decision, Any]:
        """The next decision and the state after it."""
