"""check: runs the conformance suites of registered parts. Each case runs in a worker process with a
time limit.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from enginebay.cli.command import Command
from enginebay.cli.show import progress
from enginebay.cli.table_rows import Rows
from enginebay.config import make_config
from enginebay.errors import InputError
from enginebay.plugins.registry import Entry, Registry, load_registry
from enginebay_testing.report import CheckRecord, Filter, check
from enginebay_testing.verdicts import FAULTS
from enginebay_testing.workers import PartName

TIMEOUT_S = 120.0
NUM_SEEDS, MAX_SEEDS = 2, 1000
LEVELS = ("interpret", "compile", "run")
COLUMNS = ("verdict", "part", "level", "target", "case", "s", "detail")
DECLARATION = "declaration_holds"


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument(
        "parts",
        nargs="+",
        metavar="NAME",
        help="KIND:NAME, kernel:OP:NAME, kernel:OP:MODULE:ATTRIBUTE, executor:MODULE:ATTRIBUTE, "
        "a bare NAME, or KIND, kernel:OP or all",
    )
    parser.add_argument(
        "--all", action="store_true", help="run every case (default: representative cases only)"
    )
    parser.add_argument(
        "--case",
        metavar="TEXT",
        action="append",
        default=[],
        help="only cases with TEXT in their names; * matches any characters; may be repeated "
        "(default: all)",
    )
    parser.add_argument(
        "--target",
        metavar="NAME",
        help="only cases for this target: platform, interpreter, or architecture (default: all)",
    )
    parser.add_argument(
        "--platform",
        metavar="NAME",
        help="run on this platform (default: the best one with a device that the part declares, "
        "else the best of all)",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="config.json of a small model, to check model families with "
        "(default: a tiny model with the usual field names)",
    )
    _add_ways(parser)


def _add_ways(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that say how cases run and what is printed."""
    parser.add_argument(
        "--level",
        choices=LEVELS,
        help="interpret, compile or run (default: run; without a device: interpret and compile)",
    )
    parser.add_argument(
        "--interpret",
        action="store_true",
        help="the same as --level interpret (default: off)",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        metavar="N",
        help=f"sets of inputs for each case of a kernel (default: {NUM_SEEDS})",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="seed of the second set of inputs and of the trial (default: a secret one, "
        "which is printed)",
    )
    parser.add_argument(
        "--first-failure",
        action="store_true",
        help="end with the first case that fails (default: run all cases)",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="check kernels on the calls that --capture wrote into FILE, or on a shipped trace "
        "(default: the cases of the kit)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        metavar="S",
        help=f"max seconds per case (default: {TIMEOUT_S:g})",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="worker processes (default: 1)"
    )
    parser.add_argument(
        "--matrix", metavar="FILE", help="write the support matrix of the parts as JSON"
    )


def run(name: str, args: argparse.Namespace) -> int:
    """Run the checks, print the results, and return 1 if a case has a verdict of FAULTS."""
    if args.timeout <= 0 or args.jobs < 1:
        given = f"--timeout {args.timeout:g} --jobs {args.jobs}"
        raise InputError(given, "S > 0 and N >= 1", "Pass --timeout 60 --jobs 1.")
    if args.seeds is not None and not 1 <= args.seeds <= MAX_SEEDS:
        given = f"--seeds {args.seeds}"
        raise InputError(given, f"1 to {MAX_SEEDS}", f"Pass --seeds {NUM_SEEDS}.")
    if args.interpret and args.level not in (None, "interpret"):
        given = f"--interpret with --level {args.level}"
        raise InputError(given, "one of the two flags", "Leave one out.")
    from enginebay_testing.cases import with_path
    from enginebay_testing.kernel_trial import MAX_SEED, drawn_seed
    from enginebay_testing.suites import Choices

    if args.seed is not None and not 0 <= args.seed <= MAX_SEED:
        raise InputError(f"--seed {args.seed}", f"0 to {MAX_SEED}", "Pass --seed 7.")
    registry = load_registry()
    for selector in args.parts:
        registry = with_path(registry, selector)
    entries = _selected(registry, args.parts)
    wanted = Filter(args.all, args.case, args.target)
    if args.platform is not None:
        from enginebay.compose.platforms import find_platform

        find_platform(registry, make_config({"platform": args.platform}))
    if args.config is not None:
        from enginebay_testing.models import read_model_config

        read_model_config(args.config)
    if args.trace is not None:
        _check_trace(args.trace, entries)
    seed = drawn_seed() if args.seed is None else args.seed
    rows = Rows(COLUMNS, (11, 24, 9, 11, 40, 5))
    with progress() as watch:
        records = check(
            entries,
            "interpret" if args.interpret else args.level,
            wanted=wanted,
            timeout_s=args.timeout,
            jobs=args.jobs,
            choices=Choices(args.platform, args.config, args.seeds, seed, args.trace),
            first_failure=args.first_failure,
            tell=_print_nothing if args.json else functools.partial(_print, rows),
            watch=watch,
        )
    if not (args.first_failure and any(record.verdict in FAULTS for record in records)):
        wanted.refuse_unmatched()
    if args.matrix:
        from enginebay_testing.matrix import support_matrix

        text = json.dumps(support_matrix(registry, entries.values(), records), indent=1) + "\n"
        Path(args.matrix).write_text(text, encoding="utf-8")
    if args.json:
        print(json.dumps([dataclasses.asdict(record) for record in records], indent=2))
    else:
        _print_counts(records)
    if args.seed is None and any(entry.kind == "kernel" for entry in entries.values()):
        print(f"--seed {seed} repeats the inputs", file=sys.stderr)
    return int(_is_faulty(entries, records, args.parts))


def _check_trace(path: str, entries: Mapping[PartName, Entry]) -> None:
    """Read a trace; InputError where it or a part that is no kernel refuses it."""
    from enginebay_testing.traced_cases import describe_trace, find_trace

    others = [name.label for name, entry in entries.items() if entry.kind != "kernel"]
    if others:
        given = f"--trace for {', '.join(others[:3])}"
        raise InputError(given, "kernels", "Name kernels: kernel:OP or kernel:OP:NAME.")
    print(describe_trace(find_trace(path)), file=sys.stderr)


def _is_faulty(
    entries: Mapping[PartName, Entry], records: Sequence[CheckRecord], selectors: Sequence[str]
) -> bool:
    """Return whether a case failed, or a part that was named itself had no case that could run; the
    latter is reported on stderr.
    """
    from enginebay_testing.suites import kind_of_today

    is_faulty = any(record.verdict in FAULTS for record in records)
    chosen = {kind_of_today(selector) for selector in selectors}
    for name, entry in entries.items():
        mine = [r for r in records if (r.part, r.package) == (name.label, name.package)]
        about = [r for r in mine if r.case != DECLARATION]
        named = {entry.name, name.label} & chosen
        if named and about and all(record.verdict == "UNSUPPORTED" for record in about):
            reason = " ".join(about[0].detail.split())
            print(f"enginebay: no case of {name.label} could run: {reason}", file=sys.stderr)
            is_faulty = True
    return is_faulty


def _selected(registry: Registry, selectors: Sequence[str]) -> dict[PartName, Entry]:
    from enginebay_testing.cases import select_parts
    from enginebay_testing.suites import label

    found = (entry for selector in selectors for entry in select_parts(registry, selector))
    return {PartName(label(entry), entry.package): entry for entry in found}


def _print_nothing(record: CheckRecord) -> None:
    """Print nothing: JSON is printed when all cases have ended."""


def _print(rows: Rows, record: CheckRecord) -> None:
    r = record
    rows.add((r.verdict, r.part, r.level, r.target, r.case, f"{r.seconds:.1f}", _detail(r)))


def _print_counts(records: Sequence[CheckRecord]) -> None:
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for r in records:
        counts[f"{r.part} {r.level} {r.target}".strip()][r.verdict] += 1
    for where, verdicts in counts.items():
        print(f"{where}: {', '.join(f'{n} {verdict}' for verdict, n in sorted(verdicts.items()))}")


def _detail(record: CheckRecord) -> str:
    """Return the detail as one line: error and bound first, if known, or the compiler's figures."""
    detail = " ".join(record.detail.split())
    if record.bound is not None:
        error = "not a number" if record.error is None else f"{record.error:.3g}"
        return f"error {error}, allowed {record.bound:.3g}; {detail}"
    return detail or ", ".join(f"{name} {value}" for name, value in record.figures.items())


COMMAND = Command(add_arguments, run)
