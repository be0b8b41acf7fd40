"""Checking parts and reporting: a record for each case, as `enginebay check --json` prints them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from enginebay.registry import Entry
from enginebay.testing.verdicts import Verdict
from enginebay.testing.workers import CaseName, PartName, Pool, Result


@dataclasses.dataclass(frozen=True)
class CheckRecord:
    """One line of the report: a case of a part, and what came of it. `error` and `bound` are null where nothing was compared."""

    part: str
    op: str
    name: str
    package: str
    version: str
    level: str
    target: str
    case: str
    verdict: Verdict
    detail: str
    error: float | None
    bound: float | None
    seconds: float
    figures: dict[str, int]
    traits: dict[str, str]


def check(
    entries: Mapping[PartName, Entry],
    level: str | None,
    *,
    everything: bool,
    timeout_s: float,
    jobs: int,
    watch: Callable[[str, int, int], None] | None = None,
) -> list[CheckRecord]:
    """The records of all cases, or of the representative ones, in the order of the parts and their cases.

    `watch` is told how many are done, and of how many that are known.
    """

    def wanted(case: CaseName) -> bool:
        return everything or case.representative

    results = []
    pool = Pool(jobs, timeout_s, level, wanted)
    for result in pool.run(list(entries)):
        results.append(result)
        if watch is not None:
            watch("checks", len(results), len(results) + pool.num_waiting)
    results.sort(key=lambda result: result.order)
    return [_record(entries[result.part], result) for result in results]


def _record(entry: Entry, result: Result) -> CheckRecord:
    case, outcome = result.case, result.outcome
    return CheckRecord(
        result.part.label,
        entry.op,
        entry.name,
        entry.package,
        entry.version,
        case.level,
        case.target,
        case.name,
        outcome.verdict,
        outcome.detail,
        _finite(outcome.error),
        _finite(outcome.bound),
        round(outcome.seconds, 3),
        dict(outcome.figures),
        case.traits,
    )


def _finite(number: float | None) -> float | None:
    """JSON has no NaN and no infinity; the detail tells them."""
    return number if number is not None and math.isfinite(number) else None
