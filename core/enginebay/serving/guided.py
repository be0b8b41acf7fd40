"""Guided requests in the loop: the mask that a row needs before each step, and what each new token
does to its constraint.

A mask depends on all tokens before it. So a guided row decodes one step at a time, and is not
launched while its last token is unread. Reading that token orders the next mask; the loop collects
the mask before its next decision. Meanwhile it hands out tokens, and the device runs steps of other
rows. The loop does not wait for a slow mask: its row is "late", and is not launched until the mask,
or an error, arrives.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from enginebay.contracts.constraint import BITS, GUIDED, with_tokens
from enginebay.contracts.processor import RowValues
from enginebay.errors import EnginebayError, RequestError, StoppedError
from enginebay.plugins.blame import failure
from enginebay.serving.running import Running
from enginebay.types import FinishReason

log = logging.getLogger("enginebay.loop")


PATIENCE_S = 0.02
"""The longest time that the engine thread waits for the masks of one step. Rows with slower masks
are not launched; the others go on.
"""


def must_wait(tracked: Running) -> bool:
    """Whether the row cannot be launched yet: its last token is unread, or its next mask is still
    being computed.
    """
    return tracked.constraint is not None and (
        tracked.is_late or tracked.num_launched > len(tracked.output)
    )


def next_mask(tracked: Running) -> tuple[RowValues, ...]:
    """The mask for the row's next step: tokens that continue the text, and the stop tokens where
    the text may end.
    """
    constraint = tracked.constraint
    if constraint is None:
        return ()
    bits = constraint.bits()
    ends = tracked.request.sampling.stop_token_ids
    return (
        RowValues(GUIDED, {BITS: with_tokens(bits, ends) if constraint.may_end and ends else bits}),
    )


def advance(tracked: Running, token_ids: Iterable[int]) -> EnginebayError | None:
    """Advance the constraint by committed tokens, up to the first one that ends the text. Returns
    the error with which the request must end, or None.
    """
    constraint, ends = tracked.constraint, tracked.request.sampling.stop_token_ids
    if constraint is None:
        return None

    def accept() -> None:
        for token_id in itertools.takewhile(lambda one: one not in ends, token_ids):
            constraint.accept(token_id)

    return _guarded(tracked, accept)


def advance_all(
    rows: Sequence[Running], tokens: np.ndarray, counts: np.ndarray
) -> dict[int, EnginebayError]:
    """Advance the constraints of all guided rows by the first counts[i] of tokens[i], int32 [rows,
    steps], so that their masks are computed together.

    All these rows are late until `collect_masks` has collected their masks. Returns the errors of
    requests that must end, by the id() of their Running.
    """
    failures: dict[int, EnginebayError] = {}
    for row, tracked in enumerate(rows):
        if tracked.constraint is not None and counts[row] and not tracked.finished:
            error = advance(tracked, tokens[row, : counts[row]].tolist())
            if error is not None:
                failures[id(tracked)] = error
            else:
                tracked.is_late = True
    for tracked in rows:
        if tracked.constraint is not None and tracked.is_late and not tracked.constraint.wait(0.0):
            break  # the first wait has sent the orders of all rows
    return failures


def wait_for_mask(tracked: Running, until_s: float) -> EnginebayError | None:
    """Wait for the mask after the last token until `until_s` of the monotonic clock; if it is not
    ready then, mark the request as late. Returns the error with which the request must end, or
    None.
    """
    constraint = tracked.constraint
    if constraint is None:
        return None

    def compute() -> None:
        tracked.is_late = not constraint.wait(max(0.0, until_s - time.monotonic()))
        if not tracked.is_late:
            _ = constraint.is_done  # computes the mask

    return _guarded(tracked, compute)


def collect_masks(
    late: Sequence[Running], until_s: float
) -> tuple[list[Running], list[tuple[Running, FinishReason, EnginebayError | None]]]:
    """Wait for the masks of late requests until `until_s` of the monotonic clock. Returns the
    requests that are still late, and the requests that must end, each with its reason and error.
    Requests that have ended already are in neither list.
    """
    still: list[Running] = []
    ended: list[tuple[Running, FinishReason, EnginebayError | None]] = []
    for tracked in late:
        if tracked.finished:
            continue
        error = wait_for_mask(tracked, until_s)
        reason: FinishReason | None = "error" if error else None
        if tracked.is_late and error is None:
            still.append(tracked)
        elif (reason := reason or tracked.finish_reason()) is not None:
            ended.append((tracked, reason, error))
    return still, ended


def _guarded(tracked: Running, function: Callable[[], None]) -> EnginebayError | None:
    try:
        function()
    except (RequestError, StoppedError) as error:
        return error
    # A grammar library may raise anything, such as a Rust panic: it must end no other request.
    except BaseException as error:
        log.exception("the constraint of request %s failed", tracked.request.request_id)
        return failure("a constraint", error)
    return None
