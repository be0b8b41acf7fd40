"""Guided requests in the loop: the mask that a row needs before each step, and what its new token
makes of its constraint.

A mask depends on all tokens before it, so a guided row is decoded one step at a time, and sits out
what is launched while its last token is unread. Its next mask is ordered when that token is read,
and collected before the next decision: meanwhile tokens are handed out, and the device runs what
others were launched. A mask that is not there soon is not waited for: its row is late, and sits out
until the mask or an error comes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from enginebay.blame import failure
from enginebay.constraint import BITS, GUIDED, with_tokens
from enginebay.errors import EnginebayError, RequestError, StoppedError
from enginebay.grammar import Constraint
from enginebay.loop.request_table import RequestState
from enginebay.processor import RowValues
from enginebay.types import FinishReason

log = logging.getLogger("enginebay.loop")


PATIENCE_S = 0.02
"""Time that the engine thread waits for the masks of one step. Rows whose masks come later sit out,
and others go on.
"""


def sits_out(tracked: RequestState) -> bool:
    """Whether the row cannot be launched yet, because its next mask depends on a token that is not
    read, or is still being computed.
    """
    return tracked.constraint is not None and (
        tracked.is_late or tracked.num_launched > len(tracked.output)
    )


def next_mask(tracked: RequestState) -> tuple[RowValues, ...]:
    """What its next step must find in the row: tokens that go on, and where the text may end those
    that end it.
    """
    constraint = tracked.constraint
    if constraint is None:
        return ()
    bits = constraint.bits()
    ends = tracked.request.sampling.stop_token_ids
    return (
        RowValues(GUIDED, {BITS: with_tokens(bits, ends) if constraint.may_end and ends else bits}),
    )


def follow(tracked: RequestState, token_ids: Iterable[int]) -> EnginebayError | None:
    """Go on behind committed tokens. The error with which the request must end, or None."""
    constraint = tracked.constraint
    if constraint is None:
        return None
    ends = tracked.request.sampling.stop_token_ids
    return _guarded(tracked, lambda: accept_all(constraint, token_ids, ends))


def follow_all(
    rows: Sequence[RequestState], tokens: np.ndarray, counts: np.ndarray
) -> dict[int, EnginebayError]:
    """Go on behind the first counts[i] of tokens[i], int32 [rows, steps], in all guided rows, so
    that masks are computed together. All of them are late then, until `split_late` finds their
    masks. By the id of its record, the error with which a request must end.
    """
    failures: dict[int, EnginebayError] = {}
    for row, tracked in enumerate(rows):
        if tracked.constraint is not None and counts[row] and not tracked.finished:
            error = follow(tracked, tokens[row, : counts[row]].tolist())
            if error is not None:
                failures[id(tracked)] = error
            else:
                tracked.is_late = True
    for tracked in rows:
        if tracked.constraint is not None and tracked.is_late and not tracked.constraint.wait(0.0):
            break  # this has sent what all rows ordered
    return failures


def accept_all(constraint: Constraint, token_ids: Iterable[int], ends: Collection[int]) -> None:
    """Accept tokens up to one that ends the text."""
    for token_id in token_ids:
        if token_id in ends:
            return
        constraint.accept(token_id)


def settle(tracked: RequestState, until_s: float) -> EnginebayError | None:
    """Have the mask behind the last token, until this time of the monotonic clock at most: after
    that the request is marked as late. The error with which it must end, or None.
    """
    constraint = tracked.constraint
    if constraint is None:
        return None

    def compute() -> None:
        tracked.is_late = not constraint.wait(max(0.0, until_s - time.monotonic()))
        if not tracked.is_late:
            _ = constraint.is_done  # computes the mask

    return _guarded(tracked, compute)


def split_late(
    late: Sequence[RequestState], until_s: float
) -> tuple[list[RequestState], list[tuple[RequestState, FinishReason, EnginebayError | None]]]:
    """Of late requests, those that still are, and those that must end, each with its reason and
    error, after a wait until this time of the monotonic clock at most. Ended requests are in
    neither list.
    """
    still: list[RequestState] = []
    ended: list[tuple[RequestState, FinishReason, EnginebayError | None]] = []
    for tracked in late:
        if tracked.finished:
            continue
        error = settle(tracked, until_s)
        reason: FinishReason | None = "error" if error else None
        if tracked.is_late and error is None:
            still.append(tracked)
        elif (reason := reason or tracked.finish_reason()) is not None:
            ended.append((tracked, reason, error))
    return still, ended


def _guarded(tracked: RequestState, function: Callable[[], None]) -> EnginebayError | None:
    try:
        function()
    except (RequestError, StoppedError) as error:
        return error
    except (
        BaseException
    ) as error:  # a grammar library's, such as a panic of Rust: it ends no other request
        log.exception("the constraint of request %s failed", tracked.request.request_id)
        return failure("a constraint", error)
    return None
