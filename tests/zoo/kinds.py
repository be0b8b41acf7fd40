"""Faulty parts of every kind but kernels, and the kit's suites that must find them.

Each module of a kind has FAULTS, from a fault's name to a faulty part, and `checks`, which makes
the suite of one. A fault differs from a right part in one thing, which its name and docstring say.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from enginebay_testing.verdicts import FAULTS as FAULTY_VERDICTS
from enginebay_testing.verdicts import judge
from tests.zoo.table import put_into

Check = tuple[str, Callable[[], None]]

KINDS = (
    *("scheduler", "proposer", "sampler", "processor", "cache", "grammar", "guide"),
    *("layout", "platform", "engine", "model", "format"),
)
"""The kinds that have a zoo: tests/zoo/KINDs.py."""

MARKS = ("<!-- kinds: begin -->", "<!-- kinds: end -->")

WITHOUT_PROGRAMS = ("scheduler", "proposer", "cache", "grammar", "guide", "format")
"""Kinds whose suites compile nothing."""


class Zoo(Protocol):
    """What the module of a kind has."""

    FAULTS: Mapping[str, Any]
    RIGHT: Mapping[str, Any]
    """Right parts, of which no check may fail."""

    def checks(self, part: Any) -> Iterable[Check]:
        """The kit's suite for a part of FAULTS or RIGHT."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The first check that a part fails; None: it passes the suite."""

    kind: str
    name: str
    check: str | None
    detail: str = ""


def zoo_of(kind: str) -> Zoo:
    """The zoo of a kind."""
    found: Any = importlib.import_module(f"tests.zoo.{kind}s")
    return found


def first_finding(kind: str, name: str, part: Any) -> Finding:
    """Run the suite of a kind on a part until a check fails."""
    for check_name, check in zoo_of(kind).checks(part):
        outcome = judge(check)
        if outcome.verdict in FAULTY_VERDICTS:
            return Finding(kind, name, check_name, " ".join(outcome.detail.split())[:160])
    return Finding(kind, name, None)


def table(kinds: Sequence[str] = KINDS) -> list[Finding]:
    """What the suites find of every fault of some kinds."""
    return [
        first_finding(kind, name, part)
        for kind in kinds
        for name, part in zoo_of(kind).FAULTS.items()
    ]


def summary(findings: Sequence[Finding]) -> str:
    """Markdown: of each kind, how many faults its suite finds, and the suite's checks that found
    them.
    """
    lines = ["| kind | faults | found | checks that found them |", "|---|---|---|---|"]
    for kind in dict.fromkeys(finding.kind for finding in findings):
        mine = [finding for finding in findings if finding.kind == kind]
        found = [finding.check for finding in mine if finding.check is not None]
        lines.append(f"| {kind} | {len(mine)} | {len(found)} | {len(set(found))} |")
    return "\n".join(lines)


def main(kinds: Sequence[str], page: Path | None = None) -> int:
    """Print each finding, put the summary into a page if one is given, and return 1 when a fault
    was not found.
    """
    findings = []
    for kind in kinds or KINDS:
        for name, part in zoo_of(kind).FAULTS.items():
            finding = first_finding(kind, name, part)
            findings.append(finding)
            print(f"| {kind} | {name} | {finding.check or 'NOT FOUND'} |", flush=True)
    print(summary(findings))
    if page is not None:
        put_into(page, summary(findings), MARKS)
    return int(any(finding.check is None for finding in findings))


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(prog="python -m tests.zoo.kinds")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="all of them without one")
    parser.add_argument(
        "--docs", type=Path, metavar="FILE", help="put the summary between this page's marks"
    )
    given = parser.parse_args()
    raise SystemExit(main(given.kinds, given.docs))
