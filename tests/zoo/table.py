"""The zoo's findings as a table for docs/checking.md."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from pathlib import Path

from tests.zoo.runs import Finding
from tests.zoo.zoo import FAULTS

MARKS = ("<!-- zoo: begin -->", "<!-- zoo: end -->")

WANTED = {"A": (0.95, 0.99), "B": (0.95, 0.99)}
"""Shares of a half's faults that the default check and --all must find."""


def summary(findings: Sequence[Finding]) -> tuple[str, bool]:
    """Markdown, and whether both halves have the shares that are wanted of them."""
    known = {fault.name: fault for fault in FAULTS}
    lines = ["| half | op | faults | default check | `--all` |", "|---|---|---|---|---|"]
    good = True
    for half in ("A", "B"):
        mine = [f for f in findings if known[f.name].half == half]
        by_op: dict[str, list[Finding]] = collections.defaultdict(list)
        for finding in mine:
            by_op[known[finding.name].op].append(finding)
        lines += [_line(half, op, found) for op, found in sorted(by_op.items())]
        if mine:
            lines.append(_line(half, "all", mine))
            shares = (
                sum(f.default for f in mine) / len(mine),
                sum(f.all for f in mine) / len(mine),
            )
            good &= all(share >= wanted for share, wanted in zip(shares, WANTED[half], strict=True))
    missed = [f.name for f in findings if not f.all]
    late = [f.name for f in findings if f.all and not f.default]
    lines += [
        "",
        (
            f"Found by `--all` alone: {', '.join(late) or 'none'}. Missed: "
            f"{', '.join(missed) or 'none'}."
        ),
    ]
    return "\n".join(lines), good


def put_into(page: Path, text: str, marks: tuple[str, str] = MARKS) -> None:
    """Write the table between two marks of a page, the zoo's unless others are given."""
    old = page.read_text(encoding="utf-8")
    before, _, rest = old.partition(marks[0])
    _, _, after = rest.partition(marks[1])
    page.write_text(f"{before}{marks[0]}\n{text}\n{marks[1]}{after}", encoding="utf-8")


def _line(half: str, op: str, found: Sequence[Finding]) -> str:
    default, every = sum(f.default for f in found), sum(f.all for f in found)
    shares = " | ".join(_share(num, len(found)) for num in (default, every))
    return f"| {half} | {op} | {len(found)} | {shares} |"


def _share(num: int, total: int) -> str:
    """Return a count with its share of the total; only the total itself is 100 %."""
    return f"{num} ({100 if num == total else min(99, round(100 * num / total))}%)"
