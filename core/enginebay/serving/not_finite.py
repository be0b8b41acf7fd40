"""The errors of requests whose logits or hidden states are not finite."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from enginebay.errors import EnginebayError, NonFiniteError
from enginebay.serving.in_flight import InFlight
from enginebay.types import NOT_FINITE


def rows_not_finite(tokens: np.ndarray) -> list[int]:
    """Return the rows of tokens int32 [rows, steps] whose logits had NaN or infinity."""
    marked = tokens == NOT_FINITE
    return np.flatnonzero(marked.any(axis=1)).tolist() if marked.any() else []


def not_finite(
    step: InFlight, tokens: np.ndarray, failed_hidden: Sequence[int], dtype: str
) -> dict[int, EnginebayError]:
    """Return the error of each request whose logits or pooled hidden states in a step have NaN or
    infinity, by the id of its Running.

    tokens int32 [rows, steps]; failed_hidden: rows of the second kind; `dtype` is that of the
    configuration.
    """
    found: dict[int, EnginebayError] = {}
    failed_logits = rows_not_finite(tokens)
    kind = "verify" if step.plan.verifies else "decode" if step.plan.is_decode else "prefill"
    todo = "Look for broken weights with --verify-weights."
    if dtype == "float16":
        todo = (
            "float16 overflows above 65504: leave --dtype float16 out, and auto chooses a dtype "
            f"with a wider range. {todo}"
        )
    for row in (*failed_hidden, *failed_logits):
        tracked = step.rows[row]
        what = "hidden states"
        if row in failed_logits:
            number = len(tracked.output) + int((tokens[row] >= 0).sum()) + 1
            what = f"logits for token {number}"
        given = (
            f"the {what} of request {tracked.request.request_id} have NaN or infinity "
            f"(row {row} of a {kind} step of {len(step.rows)} rows)"
        )
        found[id(tracked)] = NonFiniteError(given, "finite numbers", todo)
    return found
