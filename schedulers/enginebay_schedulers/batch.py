"""Continuous batching as pure functions: from an order of all requests to the rows that are
preempted, prefilled and decoded.
"""

from __future__ import annotations

import dataclasses
import heapq
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Annotated, TypeAlias

from pydantic import Field

from enginebay.contracts.scheduler import Decision, Limits, RunningView, SchedulerView, WaitingView

One: TypeAlias = RunningView | WaitingView

FEW_STREAMS = 8
"""Streaming requests up to which a decision decodes `stream_chunk_tokens` steps. With more of them
the host's work for each call would take a large share of the time.
"""

FewSteps = Annotated[
    int,
    Field(
        ge=1,
        description="max decode steps in one call while other requests prefill or could be "
        "admitted: more steps spread the host's work, with fewer steps new requests start sooner",
    ),
]
MaxWait = Annotated[
    float,
    Field(
        ge=0,
        allow_inf_nan=False,
        description="seconds after which a waiting request goes before all that came later",
    ),
]


@dataclasses.dataclass(frozen=True, slots=True)
class PromptBudget:
    """What prompts may use: free rows, tokens of the budget, tokens of free cache."""

    rows: int
    budget: int
    tokens: int


def run_batch(view: SchedulerView, order: Sequence[One], few_steps: int) -> Decision:
    """Return the decision for requests in this order; the first ones get budget and cache first.

    `order` has every running request, and at least as many of the waiting ones as there are free
    rows.

    - Preemption: if the cache cannot hold the next token of all decoding rows, rows are preempted
      from the end of the order until it can. The first row is never preempted, so there is always
      progress. A decision that preempts admits no request.
    - Prompts: each decoding row takes one token of the budget. Prompts get the rest: first those of
      partly prefilled rows, then those of waiting requests. The last of them gets a chunk. A
      waiting request is admitted if there are a free row and free cache for its prompt and one
      token. If there are not, no request after it is admitted.
    - Decode steps: while other requests prefill or could be admitted, a decision has `few_steps`
      steps. A new request then waits for at most `few_steps` steps, and the host's work is shared
      by as many. Otherwise a decision has as many steps as the engine and `max_steps` allow. While
      requests wait, it ends when the first row is certain to end.
    """
    limits = view.limits
    rows = [one for one in order if isinstance(one, RunningView)]
    line = [one for one in order if isinstance(one, WaitingView)]
    preempt, kept, free_tokens = make_room(rows, limits)
    decoding = decodable(kept, limits)
    room = _room_beside(decoding, limits, free_tokens)
    prefill, room = fill_budget(kept if preempt else order, room)
    named = {name for name, _ in prefill}
    next_up = None
    for one in line:
        if one.request_id not in named:
            next_up = one
            break
    hurry = bool(prefill) or max([row.num_left for row in kept], default=0) > 0
    hurry = hurry or (
        next_up is not None and has_room(next_up, dataclasses.replace(room, budget=1))
    )
    if not decoding:
        return Decision(prefill, (), 1, preempt)
    steps = _wanted_steps(view, decoding, few_steps, hurry=hurry)
    steps = steps_that_fit(decoding, steps, room.tokens)
    return Decision(prefill, tuple([row.request_id for row in decoding]), steps, preempt)


def everybody(view: SchedulerView) -> list[One]:
    """Return running and waiting requests."""
    return [*view.running, *view.waiting]


def oldest_first(rows: Iterable[RunningView]) -> list[RunningView]:
    """Return running requests by arrival, so that the latest one is preempted first."""
    return sorted(rows, key=operator.attrgetter("arrival_s"))


def first_in_line(
    view: SchedulerView, key: Callable[[WaitingView], float], max_wait_s: float
) -> list[WaitingView]:
    """Return as many waiting requests as there are free rows.

    Requests that have waited for `max_wait_s` come first, by arrival; then the others by their key,
    the smallest first.
    """

    def rank(one: WaitingView) -> tuple[bool, float, float]:
        late = view.now_s - one.arrival_s >= max_wait_s
        return (not late, 0.0 if late else key(one), one.arrival_s)

    return heapq.nsmallest(max(1, view.limits.free_rows), view.waiting, key=rank)


def cache_to_admit(one: WaitingView) -> int:
    """Return the tokens of cache that a waiting request needs.

    They are its prompt without the shared prefix, and one new token.
    """
    return one.num_prompt_tokens + 1 - one.num_shared_tokens


def given_back(row: RunningView) -> int:
    """Return the tokens of cache that preempting a row frees, if it shares none."""
    if row.num_promised is None:
        return row.num_tokens + row.max_new_left - 1
    return row.num_promised


def decodable(rows: Iterable[RunningView], limits: Limits) -> list[RunningView]:
    """Return the rows whose prompt is prefilled, as many as the budget has tokens."""
    ready = [row for row in rows if row.num_left == 0 and row.max_new_left > 0]
    return ready[: limits.max_num_batched_tokens]


def max_steps(view: SchedulerView) -> int:
    """Decode steps of a decision at most: the engine's limit, and while requests stream
    `stream_chunk_tokens` for each FEW_STREAMS of them, or part of as many.
    """
    limits, groups = view.limits, -(-view.num_streaming // FEW_STREAMS)
    if not groups:
        return limits.max_decode_steps
    return min(limits.max_decode_steps, groups * limits.stream_chunk_tokens)


def is_ending(row: RunningView) -> bool:
    """Return whether all tokens of a row are launched; reading them will free its cache."""
    return row.num_left == 0 and row.max_new_left == 0


def room_beside(rows: Iterable[RunningView], limits: Limits) -> PromptBudget:
    """Return what prompts may use after one decode step of all rows that can decode."""
    return _room_beside(decodable(rows, limits), limits, limits.free_tokens)


def _room_beside(decoding: Sequence[RunningView], limits: Limits, free_tokens: int) -> PromptBudget:
    budget = limits.max_num_batched_tokens - len(decoding)
    return PromptBudget(limits.free_rows, budget, free_tokens - growth(decoding, 1))


def growth(decoding: Iterable[RunningView], num_steps: int) -> int:
    """Return the tokens of cache that these rows need for `num_steps` steps."""
    return sum([row.growth(num_steps) for row in decoding])


def make_room(
    rows: Sequence[RunningView], limits: Limits
) -> tuple[tuple[str, ...], list[RunningView], int]:
    """Return (preempted rows, kept rows, free tokens), so that each decoding row can run one step.

    Rows that are ending are preempted first, because nothing is computed again for them; then rows
    from the end of `rows`.
    """
    kept, free_tokens = list(rows), limits.free_tokens
    preempt: list[str] = []
    if len(kept) < 2 or growth(decodable(kept, limits), 1) <= free_tokens:
        return (), kept, free_tokens
    victims = [row for row in rows if is_ending(row)]
    victims += [row for row in reversed(rows) if not is_ending(row)]
    for victim in victims[:-1]:
        if growth(decodable(kept, limits), 1) <= free_tokens:
            break
        kept.remove(victim)
        preempt.append(victim.request_id)
        free_tokens += given_back(victim)
    return tuple(preempt), kept, free_tokens


def has_room(one: WaitingView, room: PromptBudget) -> bool:
    """Return whether a waiting request can be admitted."""
    return room.rows > 0 and room.budget > 0 and cache_to_admit(one) <= room.tokens


def fill_budget(
    order: Iterable[One], room: PromptBudget
) -> tuple[tuple[tuple[str, int], ...], PromptBudget]:
    """Return (prefills in this order, the room after them).

    When a waiting request is not admitted, no later one is.
    """
    prefill: list[tuple[str, int]] = []
    is_open = True
    for one in order:
        if room.budget < 1:
            break
        num_left = one.num_left
        if not num_left:
            continue  # a decoding row
        num = min(num_left, room.budget)
        if isinstance(one, WaitingView):
            is_open = is_open and has_room(one, room)
            if not is_open:
                continue
            room = PromptBudget(room.rows - 1, room.budget, room.tokens - cache_to_admit(one))
        prefill.append((one.request_id, num))
        room = dataclasses.replace(room, budget=room.budget - num)
    return tuple(prefill), room


def without(view: SchedulerView, names: Collection[str]) -> SchedulerView:
    """Return the view without these running requests, with their cache free."""
    gone = [row for row in view.running if row.request_id in names]
    limits = dataclasses.replace(
        view.limits,
        free_rows=view.limits.free_rows + len(gone),
        free_tokens=view.limits.free_tokens + sum(map(given_back, gone)),
    )
    kept = tuple(row for row in view.running if row.request_id not in names)
    return dataclasses.replace(view, running=kept, limits=limits)


def steps_that_fit(decoding: Sequence[RunningView], steps: int, spare: int) -> int:
    """Return the largest number of steps, up to `steps`, whose cache fits.

    The cache of the first step is reserved; that of later steps must fit into `spare` tokens.
    """
    if len(decoding) * (steps - 1) <= spare:
        return steps  # no row grows by more than a token a step
    first = growth(decoding, 1)
    while steps > 1 and growth(decoding, steps) - first > spare:
        steps -= 1
    return steps


def _wanted_steps(
    view: SchedulerView, decoding: Sequence[RunningView], few_steps: int, *, hurry: bool
) -> int:
    most = min(max_steps(view), max([row.max_new_left for row in decoding]))
    if hurry:
        return min(most, few_steps)
    return (
        min(most, max(few_steps, min([row.max_new_left for row in decoding])))
        if view.waiting
        else most
    )
