"""Run the cheats through the commands: `python -m tests.zoo.cheats [NAME ...]`.

Each cheat meets `enginebay check`, `bench kernels`, `tune` and a comparison, each in a process of
its own, which must name it and give it no figure.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.zoo.cheats.listed import CHEATS, COMMANDS, Cheat
from tests.zoo.table import put_into

MARKS = ("<!-- cheats: begin -->", "<!-- cheats: end -->")
LIMIT_S = 600.0
GROUPS = {
    "results": "return, keep or delay results",
    "inputs": "recognise, change or shortcut inputs",
    "process": "change the process",
    "importing": "change the process on import",
    "answers": "let others answer, or recognise a check",
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a command says of a cheat, and whether that names it."""

    cheat: str
    command: str
    named: bool
    says: str


def asked(cheat: Cheat, command: str, folder: str) -> list[str]:
    """The words of a command that meets a cheat."""
    program = [sys.executable, "-m", "enginebay"]
    if command == "check":
        return [*program, "check", f"kernel:rms_norm:{cheat.path}", "--case", "[trial]", "--json"]
    if command == "compare":
        return [sys.executable, "-m", "tests.zoo.cheats.compared", cheat.path]
    words = ["bench", "kernels"] if command == "bench" else ["tune", f"--tuned-folder={folder}"]
    sizes = ("--shapes", "smollm2-135m/decode/b1", "--dtype", "float32", "--rounds", "1")
    return [*program, *words, "--op", "rms_norm", "--impl", cheat.path, *sizes, "--json"]


def said(command: str, text: str) -> str:
    """What a command's output says of the kernel; "figures" where it was measured."""
    record = json.loads(text)
    if command == "check":
        (found,) = [one for one in record if one["case"].endswith("[trial]")]
        return f"{found['verdict'].lower()}: {found['detail']}"
    if command == "compare":
        return f"{record['verdict']}: {record['text'].partition(' kernel ')[2].partition(' ')[2]}"
    (one,) = record["figures"] if command == "bench" else record["results"]
    return one["reason"] or "figures"


def find(cheat: Cheat, command: str) -> Finding:
    """Run a command on a cheat."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            asked(cheat, command, folder),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            check=False,
        )
        kept = list(Path(folder).iterdir())
    try:
        says = said(command, done.stdout)
    except (ValueError, KeyError, IndexError):
        says = f"exit code {done.returncode}: {done.stderr[-500:]}"
    named = says.startswith(f"cheat: {cheat.says}") and done.returncode == 1 and not kept
    return Finding(cheat.name, command, named, says)


def summary(findings: Sequence[Finding]) -> str:
    """Markdown: of each group, how many cheats each command names, of those that it met."""
    lines = [f"| kernels that | {' | '.join(COMMANDS)} |", f"|---|{'---|' * len(COMMANDS)}"]
    groups = {
        title: [c for c in CHEATS if c.name.partition("_")[0] == key]
        for key, title in GROUPS.items()
    }
    for title, cheats in {**groups, "all": list(CHEATS)}.items():
        cells = []
        for command in COMMANDS:
            names = {cheat.name for cheat in cheats}
            mine = [f for f in findings if f.command == command and f.cheat in names]
            cells.append(f"{sum(f.named for f in mine)}/{len(mine)}")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.cheats")
    parser.add_argument("names", nargs="*", metavar="NAME", help="cheats; all without one")
    parser.add_argument("--command", choices=COMMANDS, action="append", help="commands (all)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (2)")
    parser.add_argument(
        "--docs", type=Path, metavar="FILE", help="put the table between this page's marks"
    )
    args = parser.parse_args()
    work = [
        (cheat, command)
        for cheat in CHEATS
        for command in args.command or COMMANDS
        if command in cheat.meets and (not args.names or cheat.name in args.names)
    ]
    findings = []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for found in pool.map(lambda pair: find(*pair), work):
            findings.append(found)
            start = "named " if found.named else "MISSED"
            print(f"{start} {found.command:8} {found.cheat}: {found.says}"[:200], flush=True)
    print(summary(findings))
    if args.docs:
        put_into(args.docs, summary(findings), MARKS)
    return int(not all(found.named for found in findings))


if __name__ == "__main__":
    sys.exit(main())
