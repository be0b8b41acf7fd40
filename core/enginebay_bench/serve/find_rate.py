"""Searches the highest rate of arrivals at which a server holds its bounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

MAX_STEPS = 12
"""Doublings or halvings until both a rate that holds and one that does not are known."""

CLOSE = 1.1
"""The search ends when the lowest rate that failed is at most this multiple of the highest that
held.
"""


@dataclasses.dataclass(frozen=True)
class FoundRate:
    """Requests per second: the highest rate that held, and the lowest that did not.

    None where no measured rate held, or none failed.
    """

    highest_held: float | None
    lowest_failed: float | None


def find_rate(
    holds: Callable[[float], bool], holds_alone: Callable[[], bool], first: float
) -> FoundRate:
    """Search from the rate `first`. `holds` measures one rate; `holds_alone` sends one request
    after the other, and is called when `first` does not hold: if that does not hold either, no rate
    does.

    The rate is doubled while it holds, or halved until it does; then the search bisects by the
    geometric mean. A rate above one that failed is never measured.
    """
    held: float | None = None
    failed: float | None = None
    rate = first
    for _ in range(MAX_STEPS):
        if holds(rate):
            held = rate
        elif held is None and failed is None and not holds_alone():
            return FoundRate(None, rate)
        else:
            failed = rate
        if held is not None and failed is not None:
            break
        rate = rate * 2 if failed is None else rate / 2
    while held is not None and failed is not None and failed > CLOSE * held:
        middle = (held * failed) ** 0.5
        if holds(middle):
            held = middle
        else:
            failed = middle
    return FoundRate(held, failed)
