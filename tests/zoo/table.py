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
    by_op: dict[str, dict[str, list[Finding]]] = collections.defaultdict(dict)
    for finding in findings:
        fault = known[finding.name]
        for op in (fault.op, "all"):
            by_op[op].setdefault(fault.half, []).append(finding)
    ops = sorted(by_op, key=lambda op: (op == "all", op))
    lines = ["| op | half A | half B |", "|---|---|---|"]
    for op in ops:
        cells = (_cell(by_op[op].get(half, [])) for half in ("A", "B"))
        lines.append(f"| {op} | {' | '.join(cells)} |")
    good = True
    for half, mine in by_op["all"].items():
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


def _cell(found: Sequence[Finding]) -> str:
    """The number of faults; where some were missed, the numbers that the two checks found too."""
    default, every = sum(f.default for f in found), sum(f.all for f in found)
    total = len(found)
    return str(total) if default == every == total else f"{default}, {every} of {total}"
