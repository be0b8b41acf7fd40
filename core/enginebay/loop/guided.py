"""Guided requests in the loop: the mask that a row needs before each step, and what its new token
makes of its constraint.

A mask depends on all tokens before it, so a guided row is decoded one step at a time, and sits out
what is launched while its last token is unread. Its next mask is computed when that token is read,
while the device runs what others were launched.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from enginebay.blame import failure
from enginebay.constraint import BITS, GUIDED, with_tokens
from enginebay.errors import EnginebayError, RequestError
from enginebay.loop.request_table import RequestState
from enginebay.processor import RowValues

log = logging.getLogger("enginebay.loop")


def sits_out(tracked: RequestState) -> bool:
    """Whether the row cannot be launched yet, because its next mask depends on a token that is not
    read.
    """
    return tracked.constraint is not None and tracked.num_launched > len(tracked.output)


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
    """Go on behind committed tokens, and compute the next mask. The error with which the request
    must end, or None.
    """
    constraint = tracked.constraint
    if constraint is None:
        return None
    try:
        for token_id in token_ids:
            if token_id in tracked.request.sampling.stop_token_ids:
                return None
            constraint.accept(token_id)
            _ = constraint.is_done  # computes the mask
    except RequestError as error:
        return error
    except (
        BaseException
    ) as error:  # a grammar library's, such as a panic of Rust: it ends no other request
        log.exception("the constraint of request %s failed", tracked.request.request_id)
        return failure("a constraint", error)
    return None
