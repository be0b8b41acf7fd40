"""Figures of one load: percentiles, rates and counts, computed from the timelines of its
requests.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from enginebay_bench.serve.bounds import Bounds
from enginebay_bench.serve.timeline import RequestTimeline

MAX_DELAY_S = 0.010
"""A client whose own delay is longer than this in one of a hundred cases measures itself."""

MAX_ERRORS = 20
"""Kinds of errors that a result lists."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """Mean, percentiles and maximum of some seconds; percentiles are interpolated linearly."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @staticmethod
    def of(values_s: Iterable[float]) -> Summary | None:
        """The summary of all values but NaN; None when there is none."""
        values = np.asarray([value for value in values_s if not math.isnan(value)])
        if not values.size:
            return None
        p50, p90, p99 = np.percentile(values, [50, 90, 99])
        return Summary(
            float(values.mean()), float(p50), float(p90), float(p99), float(values.max())
        )


@dataclasses.dataclass(frozen=True)
class ClientCost:
    """What the client itself took: CPU seconds of its process while the load ran, and how late its
    event loop was (seconds, every 20 ms).
    """

    cpu_s: float
    delays_s: Sequence[float]


@dataclasses.dataclass(frozen=True)
class ServeFigures:
    """What a load gave. Times are seconds, rates are per second.

    Latencies are of answered requests. `itl_s` is over all gaps between chunks of all requests.
    `duration_s` is from the first scheduled time to the end of the last answer.
    """

    load: str
    rate: float | None
    concurrency: int | None
    num_requests: int
    num_answered: int
    num_failed: int
    num_empty: int
    """Answers without any chunk; they have no latencies."""
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    ttft_s: Summary | None
    itl_s: Summary | None
    tpot_s: Summary | None
    e2e_s: Summary | None
    good_share: float | None
    """Share of all requests that hold the bounds; None without bounds."""
    goodput_per_s: float | None
    num_prompt_tokens: int | None
    num_cached_tokens: int | None
    num_output_tokens: int
    num_chunks: int
    tokens_counted_by: str
    mean_in_flight: float
    max_in_flight: int
    finish_reasons: dict[str, int]
    errors: dict[str, int]
    lag_s: Summary | None
    client_delay_s: Summary | None
    client_cpu_s: float
    client_cpu_us_per_token: float | None

    @property
    def is_client_slow(self) -> bool:
        """Whether the client was so late that its figures are in doubt."""
        return any(
            one is not None and one.p99 > MAX_DELAY_S for one in (self.lag_s, self.client_delay_s)
        )


def make_figures(
    timelines: Sequence[RequestTimeline],
    cost: ClientCost,
    *,
    rate: float | None = None,
    concurrency: int | None = None,
    bounds: Bounds | None = None,
) -> ServeFigures:
    """The figures of ended requests; `timelines` has one at least."""
    answered = [one for one in timelines if one.error is None]
    first_s = min(one.due_s for one in timelines)
    duration_s = max(max(one.ended_s for one in timelines) - first_s, 1e-9)
    num_tokens = sum(one.num_tokens for one in answered)
    num_good = None if bounds is None else sum(map(bounds.holds, timelines))
    in_flight = [one.ended_s - one.sent_s for one in timelines if not math.isnan(one.sent_s)]
    errors = collections.Counter(one.error for one in timelines if one.error is not None)
    return ServeFigures(
        load=f"{rate:.4g}/s" if rate is not None else f"{concurrency} in flight",
        rate=rate,
        concurrency=concurrency,
        num_requests=len(timelines),
        num_answered=len(answered),
        num_failed=len(timelines) - len(answered),
        num_empty=sum(not one.chunk_s for one in answered),
        duration_s=duration_s,
        requests_per_s=len(answered) / duration_s,
        output_tokens_per_s=num_tokens / duration_s,
        ttft_s=Summary.of(one.ttft_s for one in answered),
        itl_s=Summary.of(gap for one in answered for gap in one.gaps_s),
        tpot_s=Summary.of(one.tpot_s for one in answered),
        e2e_s=Summary.of(one.e2e_s for one in answered),
        good_share=None if num_good is None else num_good / len(timelines),
        goodput_per_s=None if num_good is None else num_good / duration_s,
        num_prompt_tokens=_total([one.num_prompt_tokens for one in answered]),
        num_cached_tokens=_total([one.num_cached_tokens for one in answered]),
        num_output_tokens=num_tokens,
        num_chunks=sum(len(one.chunk_s) for one in answered),
        tokens_counted_by=", ".join(sorted({one.token_source for one in answered})),
        mean_in_flight=sum(in_flight) / duration_s,
        max_in_flight=most_at_once([(one.sent_s, one.ended_s) for one in timelines]),
        finish_reasons=dict(collections.Counter(one.finish_reason or "none" for one in answered)),
        errors=dict(errors.most_common(MAX_ERRORS)),
        lag_s=Summary.of(one.lag_s for one in timelines),
        client_delay_s=Summary.of(cost.delays_s),
        client_cpu_s=cost.cpu_s,
        client_cpu_us_per_token=1e6 * cost.cpu_s / num_tokens if num_tokens else None,
    )


def most_at_once(spans: Iterable[tuple[float, float]]) -> int:
    """The largest number of (start, end) spans that overlap; spans with NaN are left out."""
    events: list[tuple[float, int]] = []
    for start, end in spans:
        if not math.isnan(start) and not math.isnan(end):
            events += [(start, 1), (end, -1)]
    most = now = 0
    for _, change in sorted(events):
        now += change
        most = max(most, now)
    return most


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
