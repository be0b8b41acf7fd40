#!/usr/bin/env python3
"""Runs the parts of `make test-all`, and records date and outcome of each in docs/testing.md.

    tools/test_all.py [PART ...]     all parts, or the named ones
    tools/test_all.py --list         the parts and what they need

A part is one or two goals of the Makefile. When a program that a part needs is not installed, the
script reports the part as skipped, and the part keeps its row. The exit code is 1 when a part
failed. The script needs only Python's standard library.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "testing.md"
BEGIN, END = "<!-- parts: begin -->", "<!-- parts: end -->"
HEADER = (
    "| part | what it runs | commit | date | minutes | outcome |",
    "|---|---|---|---|---|---|",
)
NEVER = ("-", "-", "-", "has not run yet")
SUMMARY = re.compile(r"^=*\s?((?:\d+ \w+(?:, )?)+) in [\d.]+s", re.MULTILINE)
"""Matches pytest's closing line."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Goals of the Makefile, run in order, and the programs that they need besides Python."""

    name: str
    goals: tuple[str, ...]
    what: str
    needs: tuple[str, ...] = ()


PARTS = (
    Part("slow", ("test-slow",), "tests marked `slow`, compiled as for users"),
    Part("busy", ("test-busy",), "`make test` and `make test-long` beside four busy processes"),
    Part(
        "oldest",
        ("test-oldest", "serve-oldest"),
        "`make test` and `make test-serve` on Python 3.11 with the oldest dependencies",
    ),
    Part(
        "newest",
        ("newest-versions", "test-newest", "serve-newest"),
        "`make test` and `make test-serve` with the newest jax, flax, transformers, numpy and "
        "pytest",
    ),
    Part("first", ("test-first",), "tokens of engines with the first programs alone"),
    Part("parity", ("parity",), "live comparison with transformers on torch"),
    Part(
        "kernels",
        ("test-kernels", "check-kernels"),
        "kernels interpreted, and compiled for TPUs and GPUs",
    ),
    Part("eval", ("test-eval",), "tasks of lm-eval (extra `eval`)"),
    Part("load", ("test-load",), "200 clients of the HTTP server for three minutes, and signals"),
    Part(
        "outside",
        ("test-outside",),
        "metrics as `promtool` reads them, and the dashboard's queries in Prometheus",
        ("promtool", "prometheus"),
    ),
    Part(
        "clients",
        ("test-clients",),
        "LangChain, LiteLLM, llm, lm-eval and schemathesis as clients of a server",
    ),
    Part("gguf", ("test-gguf",), "GGUF files against llama.cpp: token ids and logits"),
    Part(
        "cluster", ("test-cluster",), "the HTTP server with two engine processes, which are killed"
    ),
    Part("browser", ("test-browser",), "the server's page in Chromium", ("chromium",)),
    Part("coverage", ("coverage",), "line coverage of `make test`"),
    Part("mutants", ("mutants",), "faults planted into ten modules, which their tests must find"),
    Part(
        "zoo",
        ("zoo", "zoo-right"),
        "faulty kernels, which the check must find, and right ones in 20 seeds",
    ),
    Part("matrix", ("test-kernels-all",), "every case of the kernels: hours"),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a part: the text for its row, minutes, and whether it failed."""

    text: str
    minutes: float
    failed: bool = False


def missing(part: Part) -> list[str]:
    """The programs that a part needs and PATH does not have."""
    return [program for program in part.needs if shutil.which(program) is None]


def run(part: Part) -> Outcome:
    """Runs the goals of a part until one fails, and prints their output."""
    began = time.monotonic()
    found: list[str] = []
    for goal in part.goals:
        command = ["make", "--no-print-directory", goal]
        lines = []
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                lines.append(line)
        summaries = SUMMARY.findall("".join(lines))
        said = [line.strip() for line in lines if line.strip()] or [f"{goal} done"]
        found.append(summaries[-1] if summaries else said[-1].replace("|", "/"))
        if process.returncode != 0:
            text = f"FAILED in `make {goal}` (exit code {process.returncode}): {found[-1]}"
            return Outcome(text, (time.monotonic() - began) / 60, failed=True)
    return Outcome("; ".join(found), (time.monotonic() - began) / 60)


def commit() -> str:
    """The checked-out commit, with a plus sign if files other than the page differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    changed = [
        line for line in git("status", "--porcelain").splitlines() if not line.endswith(PAGE.name)
    ]
    return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")


def read_rows(text: str) -> dict[str, tuple[str, ...]]:
    """Commit, date, minutes and outcome of each part, read from the page."""
    table = text[text.index(BEGIN) : text.index(END)].splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table
        if line.startswith("| ")
    ]
    return {row[0]: tuple(row[2:6]) for row in cells[1:]}


def with_rows(text: str, rows: Mapping[str, Sequence[str]]) -> str:
    """The page with its table replaced by `rows`; a part without a row gets "has not run yet"."""
    table = [
        f"| {part.name} | {part.what} | {' | '.join(rows.get(part.name, NEVER))} |"
        for part in PARTS
    ]
    before, _, rest = text.partition(BEGIN)
    return "\n".join([before + BEGIN, *HEADER, *table, END]) + rest.partition(END)[2]


def write_row(name: str, row: Sequence[str]) -> None:
    """Writes the row of one part into the page."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_rows(text, read_rows(text) | {name: tuple(row)}), encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Returns exit code 0 when no part failed, 1 when a part failed, 2 for an unknown part."""
    by_name = {part.name: part for part in PARTS}
    parser = argparse.ArgumentParser(description="run what takes too long for `make test` and CI")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(by_name))
    parser.add_argument("--list", action="store_true", help="print the parts, run nothing")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.parts if name not in by_name]
    if unknown:
        print(f"no part {', '.join(unknown)}; the parts are {', '.join(by_name)}", file=sys.stderr)
        return 2
    if given.list:
        for part in PARTS:
            needs = f" (needs {', '.join(part.needs)})" if part.needs else ""
            print(f"{part.name:10s} {part.what}{needs}")
        return 0
    report = []
    for name in given.parts or by_name:
        part = by_name[name]
        absent = missing(part)
        if absent:
            report.append((name, f"skipped: {', '.join(absent)} is not installed", False))
            continue
        print(f"\n=== {name}", flush=True)
        outcome = run(part)
        today = dt.datetime.now(dt.UTC).date().isoformat()
        write_row(name, (commit(), today, f"{outcome.minutes:.0f}", outcome.text))
        report.append((name, outcome.text, outcome.failed))
    print("\n=== all parts")
    for name, text, _ in report:
        print(f"{name:10s} {text}")
    return int(any(failed for _, _, failed in report))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
