"""Run the zoo: `python -m tests.zoo [NAME ...]`, or `--right` for right kernels in many seeds.

Each fault runs in a process of its own, which ends at its first failing case. A crash of the kernel
counts as found, a process that takes too long does not, and any other end of a process is an error
of the zoo.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import QUICK_COMPILING
from tests.zoo.environment import ONE_THREAD, SEVERAL_DEVICES, with_cache
from tests.zoo.runs import Finding

LIMIT_S = 1500.0

CRASHES = {
    s.value: s
    for s in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
}
"""What a kernel's own crash ends a process with."""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.zoo", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="faults, or right kernels, by name; all of them without one",
    )
    parser.add_argument("--half", choices=("A", "B"), help="the faults of one half")
    parser.add_argument("--sample", action="store_true", help="the seventeen that CI runs")
    parser.add_argument(
        "--pairs",
        action="store_true",
        help="the default check only, without --all for what it misses",
    )
    parser.add_argument(
        "--right", action="store_true", help="right kernels in many seeds instead of faulty ones"
    )
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="with --right: seeds (5)")
    parser.add_argument("--all", action="store_true", help="with --right: every triple too")
    parser.add_argument("--op", metavar="NAME", help="with --right: kernels of this op alone")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (2)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the findings as JSON")
    parser.add_argument(
        "--found",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="the findings of earlier runs instead of a new one, the latest last",
    )
    parser.add_argument(
        "--docs", type=Path, metavar="FILE", help="put the table between this page's marks"
    )
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--one-right", nargs=2, help=argparse.SUPPRESS)
    return parser


def main() -> int:
    args = parser().parse_args()
    if args.one:
        from tests.zoo.one import run_one

        return run_one(args.one, triples=not args.pairs)
    if args.one_right:
        from tests.zoo.one import run_one_right

        return run_one_right(*args.one_right, seeds=args.seeds, triples=args.all)
    if args.right:
        from tests.zoo.rights import run_rights

        return run_rights(args)
    from tests.zoo.table import put_into, summary

    if args.found:
        findings = read_findings(args.found)
    else:
        findings = run_all(chosen(args), args.jobs, triples=not args.pairs)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(
            json.dumps([dataclasses.asdict(f) for f in findings], indent=1) + "\n", encoding="utf-8"
        )
    text, good = summary(findings)
    print(text)
    if args.docs:
        put_into(args.docs, text)
    return 0 if good or args.names else 1


def read_findings(paths: Sequence[Path]) -> list[Finding]:
    """Return the findings of all files. Of several about a fault the later one counts, except that
    a run that did not find it, or ended too soon, does not undo a run that did. Faults that the
    zoo no longer has are left out.
    """
    from tests.zoo.zoo import FAULTS

    latest: dict[str, Finding] = {}
    for path in paths:
        for fields in json.loads(path.read_text(encoding="utf-8")):
            found = Finding(**fields)
            before = latest.get(found.name, found)
            if found.default or not before.all:
                latest[found.name] = found
    return [latest[fault.name] for fault in FAULTS if fault.name in latest]


def chosen(args: argparse.Namespace) -> list[str]:
    from tests.zoo.zoo import FAULTS, SAMPLE

    known = {fault.name: fault for fault in FAULTS}
    if unknown := set(args.names) - known.keys():
        sys.exit(f"no fault of the name {', '.join(sorted(unknown))}")
    names = args.names or (SAMPLE if args.sample else list(known))
    return [name for name in names if args.half in (None, known[name].half)]


def run_all(names: list[str], jobs: int, *, triples: bool) -> list[Finding]:
    """The findings in the order of the names, each told when it is known."""
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda name: run_and_tell(name, triples=triples), names))


def run_and_tell(name: str, *, triples: bool) -> Finding:
    finding = run_in_process(name, triples=triples)
    found = "default" if finding.default else "--all" if finding.all else "MISSED"
    print(
        f"{found:8}{finding.seconds:7.1f} s  {name}: {finding.case} {finding.detail}"[:200],
        flush=True,
    )
    return finding


def run_in_process(name: str, *, triples: bool) -> Finding:
    """The finding of a process of its own."""
    command = [sys.executable, "-m", "tests.zoo", "--one", name, *([] if triples else ["--pairs"])]
    flags = " ".join([os.environ.get("XLA_FLAGS", ""), *QUICK_COMPILING, SEVERAL_DEVICES])
    environment = with_cache(os.environ | ONE_THREAD)
    environment |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding(
            name, default=False, all=False, detail=f"no end within {LIMIT_S:.0f} s", seconds=LIMIT_S
        )
    if -done.returncode in CRASHES:
        return Finding(
            name, default=True, all=True, detail=f"a crash, {CRASHES[-done.returncode].name}"
        )
    if done.returncode:
        sys.exit(f"{name}: its process ended with {done.returncode}\n{done.stderr[-2000:]}")
    return Finding(**json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    sys.exit(main())
