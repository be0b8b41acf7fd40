"""Medians, quartiles, and intervals of ratios by the bootstrap.

The percentile bootstrap: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

NUM_RESAMPLES = 4000
LEVEL = 0.95
MIN_ROUNDS = 6
"""With fewer rounds, the range of all of them is no interval of this level."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median and quartiles of a figure over rounds."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """The median and the quartiles of at least one value."""
        low, median, high = np.percentile(np.asarray(values, float), [25, 50, 75])
        return Spread(float(median), float(low), float(high))


@dataclasses.dataclass(frozen=True)
class Interval:
    """A ratio, and the interval that holds it with a probability of LEVEL; None with fewer than
    MIN_ROUNDS rounds.
    """

    ratio: float
    low: float | None
    high: float | None

    @property
    def verdict(self) -> str:
        """Such as "faster": whether the interval lies above 1, below it, or around it."""
        if self.low is None or self.high is None:
            return "too few rounds"
        if self.low > 1:
            return "faster"
        return "slower" if self.high < 1 else "no difference"


def paired_ratio(values: Sequence[float], others: Sequence[float]) -> Interval:
    """The median of the ratios values / others of the same rounds, all positive. Rounds are drawn
    again together, so what changes both does not widen the interval.
    """
    ratios = np.log(np.asarray(values, float)) - np.log(np.asarray(others, float))
    rng = np.random.default_rng(0)
    drawn = np.median(ratios[rng.integers(0, len(ratios), (NUM_RESAMPLES, len(ratios)))], axis=1)
    return _interval(float(np.median(ratios)), drawn, len(ratios))


def ratio_of_medians(values: Sequence[float], others: Sequence[float]) -> Interval:
    """The ratio of the medians of measurements that do not belong together, all positive."""
    rng, medians = np.random.default_rng(0), []
    for one in (values, others):
        logs = np.log(np.asarray(one, float))
        medians.append(np.median(logs[rng.integers(0, len(logs), (NUM_RESAMPLES, len(logs)))], 1))
    middle = float(np.median(np.log(values)) - np.median(np.log(others)))
    return _interval(middle, medians[0] - medians[1], min(len(values), len(others)))


def _interval(middle: float, drawn: np.ndarray, num_rounds: int) -> Interval:
    if num_rounds < MIN_ROUNDS:
        return Interval(math.exp(middle), None, None)
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(drawn, [tail, 100 - tail])
    return Interval(*(float(np.exp(value)) for value in (middle, low, high)))
