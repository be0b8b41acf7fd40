"""Bounds on latencies (--slo), and whether a request holds them."""

from __future__ import annotations

import dataclasses
import re

from enginebay.errors import InputError, unknown_name
from enginebay_bench.serve.timeline import RequestTimeline

UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
METRICS = ("ttft", "tpot", "itl", "e2e")
ALLOWED = "METRIC=TIME with commas between, such as ttft=200ms,tpot=50ms"


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The longest times, in seconds by metric, and the share of requests (0 to 1) that must hold
    all of them.
    """

    limits_s: dict[str, float]
    share: float = 0.9

    def holds(self, timeline: RequestTimeline) -> bool:
        """Whether the request was answered and every bounded time is short enough.

        `itl` bounds the longest gap between two chunks. A time that an answer lacks, such as `tpot`
        of one token, holds its bound; an answer without any chunk holds none.
        """
        if timeline.error is not None or not timeline.chunk_s:
            return False
        times_s = {
            "ttft": timeline.ttft_s,
            "tpot": timeline.tpot_s,
            "itl": max(timeline.gaps_s, default=0.0),
            "e2e": timeline.e2e_s,
        }
        return not any(times_s[name] > limit for name, limit in self.limits_s.items())


def parse_bounds(text: str, share: float) -> Bounds:
    """The bounds of `--slo TEXT`; InputError for another metric, another unit or a time of 0."""
    limits_s: dict[str, float] = {}
    for piece in text.split(","):
        name, _, value = (part.strip() for part in piece.partition("="))
        if name not in METRICS:
            raise unknown_name("metric of --slo", name, METRICS, f"Pass --slo {ALLOWED}.")
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", value)
        if found is None or float(found[1]) == 0:
            raise InputError(
                f"--slo {piece.strip()}",
                "a time above 0 with the unit us, ms or s",
                f"Pass --slo {name}=200ms.",
            )
        limits_s[name] = float(found[1]) * UNITS_S[found[2]]
    if not 0 < share <= 1:
        raise InputError(f"--slo-share {share:g}", "above 0, at most 1", "Pass --slo-share 0.9.")
    return Bounds(limits_s, share)
