"""check: the conformance suites of registered parts, each case under a time limit in a worker process."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from enginebay.cli.show import progress
from enginebay.errors import InputError, explain
from enginebay.registry import Entry, Registry, load_registry
from enginebay.testing.report import CheckRecord, check
from enginebay.testing.verdicts import FAULTS
from enginebay.testing.workers import PartName

TIMEOUT_S = 120.0
LEVELS = ("interpret", "compile", "run")


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument(
        "parts",
        nargs="+",
        metavar="NAME",
        help="KIND:NAME, kernel:OP:NAME, KIND, kernel:OP, all, or the bare name of parts",
    )
    parser.add_argument("--all", action="store_true", help="every case, not only the representative ones")
    parser.add_argument(
        "--level",
        choices=LEVELS,
        help="how kernels are checked; without it every level that can be done here",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        metavar="S",
        help=f"seconds for a case (default: {TIMEOUT_S:g})",
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="worker processes (default: 1)")
    parser.add_argument("--matrix", metavar="FILE", help="write the support matrix of the parts as JSON")


def run(name: str, args: argparse.Namespace) -> int:
    """Check, report, and return 1 when a case is INCORRECT, ERROR or TIMEOUT."""
    if args.timeout <= 0 or args.jobs < 1:
        given = f"--timeout {args.timeout:g} --jobs {args.jobs}"
        raise InputError(explain(given, "a positive time and at least one job", "Correct it."))
    registry = load_registry()
    entries = _selected(registry, args.parts)
    with progress() as watch:
        records = check(
            entries,
            args.level,
            everything=args.all,
            timeout_s=args.timeout,
            jobs=args.jobs,
            watch=watch,
        )
    if args.matrix:
        from enginebay.testing.matrix import support_matrix

        text = json.dumps(support_matrix(registry, entries.values(), records), indent=1) + "\n"
        Path(args.matrix).write_text(text, encoding="utf-8")
    if args.json:
        print(json.dumps([dataclasses.asdict(record) for record in records], indent=2))
    else:
        _print(records)
    return int(any(record.verdict in FAULTS for record in records))


def _selected(registry: Registry, selectors: Sequence[str]) -> dict[PartName, Entry]:
    from enginebay.testing.cases import select_parts
    from enginebay.testing.suites import label

    found = (entry for selector in selectors for entry in select_parts(registry, selector))
    return {PartName(label(entry), entry.package): entry for entry in found}


def _print(records: Sequence[CheckRecord]) -> None:
    columns = ("part", "level", "target", "case", "verdict", "s", "detail")
    table = Table(*columns, box=None, pad_edge=False)
    for r in records:
        table.add_row(r.part, r.level, r.target, r.case, r.verdict, f"{r.seconds:.1f}", _told(r))
    width = None if sys.stdout.isatty() else 200
    Console(width=width, highlight=False, markup=False).print(table)
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for r in records:
        counts[f"{r.part} {r.level} {r.target}".strip()][r.verdict] += 1
    for where, verdicts in counts.items():
        print(f"{where}: {', '.join(f'{n} {verdict}' for verdict, n in sorted(verdicts.items()))}")


def _told(record: CheckRecord) -> str:
    """The detail in a line, the error against its bound first, or the compiler's figures."""
    detail = " ".join(record.detail.split())
    if record.bound is not None:
        error = "not a number" if record.error is None else f"{record.error:.3g}"
        return f"{error} of allowed {record.bound:.3g}; {detail}"
    return detail or ", ".join(f"{name} {value}" for name, value in record.figures.items())
