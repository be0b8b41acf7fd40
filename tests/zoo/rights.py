"""The runs of right kernels: each in a process of its own, in many seeds; a failing case is a false
alarm.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import QUICK_COMPILING
from tests.zoo.environment import ONE_THREAD, SEVERAL_DEVICES, with_cache
from tests.zoo.runs import RightFinding
from tests.zoo.table import put_into
from tests.zoo.zoo import RIGHT

MARKS = ("<!-- right: begin -->", "<!-- right: end -->")

LIMIT_S = 4 * 3600.0


def run_rights(args: argparse.Namespace) -> int:
    """What `--right` does; 1 when a right kernel fails a case."""
    if args.found:
        findings = [finding for path in args.found for finding in read(path)]
    else:
        chosen = chosen_of(args.op, args.names)
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            findings = list(pool.map(lambda pair: _told(pair[0], pair[1], args), chosen))
    if args.out:
        findings = [*_others(args.out, findings), *findings]
        args.out.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps([dataclasses.asdict(f) for f in findings], indent=1)
        args.out.write_text(text + "\n", encoding="utf-8")
    print(kernel_table(findings), op_table(findings), sep="\n\n")
    if args.docs:
        put_into(args.docs, op_table(findings), MARKS)
    return int(any(finding.failed for finding in findings))


def read(path: Path) -> list[RightFinding]:
    """The findings in a file of `--out`."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return [RightFinding(**{**one, "failed": tuple(one["failed"])}) for one in found]


def chosen_of(op: str | None, names: Sequence[str]) -> list[tuple[str, str]]:
    """The right kernels of an op, or of all ops, or of some names."""
    known = {kernel for _, kernel in RIGHT}
    if unknown := set(names) - known:
        sys.exit(f"no right kernel of the name {', '.join(sorted(unknown))}")
    ops = sorted({op for op, _ in RIGHT})
    if op not in (None, *ops):
        sys.exit(f"no op {op!r}. Allowed: {', '.join(ops)}. Choose one of these.")
    return [pair for pair in RIGHT if op in (None, pair[0]) and (not names or pair[1] in names)]


def _others(path: Path, findings: Sequence[RightFinding]) -> list[RightFinding]:
    """Findings of an earlier run about kernels that this one did not run: a run may be of one op.
    A kernel that is no right one any more is left out.
    """
    mine = {(f.op, f.kernel) for f in findings}
    kept = set(RIGHT) - mine
    return [f for f in read(path) if (f.op, f.kernel) in kept] if path.exists() else []


def _told(op: str, kernel: str, args: argparse.Namespace) -> RightFinding:
    finding = _in_process(op, kernel, args)
    print(
        f"{op} {kernel}: {finding.passed} pass, {len(finding.failed)} fail, "
        f"{finding.unsupported} unsupported, {finding.seconds:.0f} s",
        *finding.failed,
        sep="\n  ",
        flush=True,
    )
    return finding


def _in_process(op: str, kernel: str, args: argparse.Namespace) -> RightFinding:
    """The finding of a process of its own. Its crash, or no end, is a failing case."""
    command = [sys.executable, "-m", "tests.zoo", "--one-right", op, kernel]
    command += ["--seeds", str(args.seeds), *(["--all"] if args.all else [])]
    quick = () if args.all else QUICK_COMPILING  # the programs of long contexts run for longer
    flags = " ".join([os.environ.get("XLA_FLAGS", ""), *quick, SEVERAL_DEVICES])
    environment = with_cache(os.environ | ONE_THREAD)
    environment |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}

    def ended(how: str) -> RightFinding:
        return RightFinding(op, kernel, args.seeds, 0, 0, (how,), 0.0)

    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return ended(f"no end within {LIMIT_S:.0f} s")
    if done.returncode:
        return ended(f"its process ended with {done.returncode}: {done.stderr[-500:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return RightFinding(**{**found, "failed": tuple(found["failed"])})


def kernel_table(findings: Sequence[RightFinding]) -> str:
    """Markdown with a line for each kernel."""
    lines = [
        "| op | kernel | passed | failed | UNSUPPORTED | CPU seconds |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {f.op} | {f.kernel} | {f.passed} | {len(f.failed)} | {f.unsupported} "
        f"| {f.seconds:.0f} |"
        for f in findings
    ]
    return "\n".join(lines)


def op_table(findings: Sequence[RightFinding]) -> str:
    """Markdown with a line for each op, and one for all."""
    by_op: dict[str, list[RightFinding]] = collections.defaultdict(list)
    for finding in findings:
        by_op[finding.op].append(finding)
    lines = ["| op | kernels | cases | seeds | false alarms |", "|---|---|---|---|---|"]
    lines += [_line(op, by_op[op]) for op in sorted(by_op)]
    return "\n".join([*lines, _line("all", findings)])


def _line(op: str, found: Sequence[RightFinding]) -> str:
    seeds = sorted({f.seeds for f in found})
    cases = sum(f.passed + len(f.failed) for f in found)
    alarms = sum(len(f.failed) for f in found)
    return f"| {op} | {len(found)} | {cases:,} | {' or '.join(map(str, seeds))} | {alarms} |"
