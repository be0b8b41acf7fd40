"""Histogram: counts of values by size, written by one thread and read by any."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import HistogramMetricFamily

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
"""Bounds of the times of a request, in seconds."""

STEP_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""Bounds of the times of a token, in seconds."""

TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Histogram:
    """Counts values by upper bound. Unlike prometheus_client's histogram it has no locks and
    labels, whose cost per token is too high.
    """

    def __init__(self, name: str, what: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.what = what
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, `times` times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Write the counts into a metric family of the same name."""
        from prometheus_client.utils import floatToGoString

        totals = itertools.accumulate(list(self._counts))
        names = [floatToGoString(bound) for bound in (*self._bounds, float("inf"))]
        buckets = list(zip(names, totals, strict=True))
        family.add_metric(list(labels), buckets=buckets, sum_value=self._sum)
