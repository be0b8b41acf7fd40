"""Checks parts and makes one record per case, as `enginebay check --json` prints them."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from enginebay.errors import UnknownNameError, unknown_name
from enginebay.html_table import html_table
from enginebay.plugins.registry import Entry
from enginebay_testing.verdicts import Verdict
from enginebay_testing.workers import CaseName, CaseResult, PartName, Pool

if TYPE_CHECKING:
    from enginebay_testing.suites import Choices


@dataclasses.dataclass(frozen=True)
class CheckRecord:
    """One record of the report: a case of a part and its outcome. `error` and `bound` are None
    where nothing was compared.
    """

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


class CheckRecords(list[CheckRecord]):
    """The records of a check. Notebooks show how many passed, and the others."""

    def _repr_html_(self) -> str:
        counts = Counter(record.verdict for record in self)
        rows = [
            (one.part, one.level, one.case, one.verdict, one.detail)
            for one in self
            if one.verdict != "PASS"
        ]
        title = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
        table = html_table(("part", "level", "case", "verdict", "why"), rows) if rows else ""
        return f"<p><b>{title or 'no cases'}</b></p>{table}"


ONLY_CASES = ("loads", "all", "runs_here")
"""Names of a case that stands alone for a part or a level; its detail gives the reason."""


def has_text(name: str, text: str) -> bool:
    """Return whether a name contains a text, in which "*" matches any characters."""
    return re.search(re.escape(text).replace(r"\*", ".*"), name) is not None


@dataclasses.dataclass
class Filter:
    """Which cases are run: all or the representative ones, or cases whose name contains one of
    `cases`, at one target.

    Texts match as in `has_text`. `seen` collects the names and targets of all cases.
    """

    everything: bool = False
    cases: Sequence[str] = ()
    target: str | None = None
    seen: set[tuple[str, str]] = dataclasses.field(default_factory=set)

    def __call__(self, case: CaseName) -> bool:
        """Return whether a case is run."""
        if case.name in ONLY_CASES:
            return True
        self.seen.add((case.name, case.target))
        if self.target not in (None, case.target):
            return False
        if self.cases:
            return any(has_text(case.name, text) for text in self.cases)
        return self.everything or case.representative

    def refuse_unmatched(self) -> None:
        """Raise UnknownNameError for a text or a target that matches no case of the
        checked parts.
        """
        names = {name for name, _ in self.seen}
        for text in self.cases if self.seen else ():
            if not any(has_text(name, text) for name in names):
                near = difflib.get_close_matches(text, names, n=3, cutoff=0.3) or sorted(names)[:3]
                given = f"--case {text}, which no case name of these parts contains"
                raise UnknownNameError(given, f"such as {', '.join(near)}", "Pass one of these.")
        targets = {target for _, target in self.seen}
        if self.seen and self.target is not None and self.target not in targets:
            raise unknown_name("target of a case", self.target, targets, "Pass --target NAME.")


def check(
    entries: Mapping[PartName, Entry],
    level: str | None,
    *,
    wanted: Filter,
    timeout_s: float,
    jobs: int,
    choices: Choices | None = None,
    first_failure: bool = False,
    tell: Callable[[CheckRecord], None] = lambda _: None,
    watch: Callable[[str, int, int], None] | None = None,
) -> CheckRecords:
    """Return the records of all `wanted` cases, in the order of the parts and their cases; with
    `first_failure`, of the cases up to the first one that fails.

    `tell` is called with each record when its case has ended, `watch` with the number of ended and
    of known cases.
    """
    from enginebay_testing.suites import Choices

    results = []
    chosen = dataclasses.asdict(choices or Choices())
    pool = Pool(jobs, timeout_s, level, wanted, chosen, quickly=not wanted.everything)
    for result in pool.run(list(entries), first_failure=first_failure):
        results.append(result)
        tell(_record(entries[result.part], result))
        if watch is not None:
            watch("checks", len(results), len(results) + pool.num_waiting)
    results.sort(key=lambda result: result.order)
    return CheckRecords(_record(entries[result.part], result) for result in results)


def _record(entry: Entry, result: CaseResult) -> CheckRecord:
    case, outcome = result.case, result.outcome
    return CheckRecord(
        part=result.part.label,
        op=entry.op,
        name=entry.name,
        package=entry.package,
        version=entry.version,
        level=case.level,
        target=case.target,
        case=case.name,
        verdict=outcome.verdict,
        detail=outcome.detail,
        error=_finite(outcome.error),
        bound=_finite(outcome.bound),
        seconds=round(outcome.seconds, 3),
        figures=dict(outcome.figures),
        traits=case.traits,
    )


def _finite(number: float | None) -> float | None:
    """Return None for NaN and infinity, which JSON does not have; the detail names them."""
    return number if number is not None and math.isfinite(number) else None
