"""Plants small faults (mutants) in a module, one at a time, and reports which make its tests fail.

python tools/mutants.py [--modules NAME ...] [--root CHECKOUT --table FILE] [--list]

The table (mutants.toml beside this file) names the modules, and for each the tests that should
fail. Mutants are drawn from the module's text alone: two checkouts in which the module is equal get
equal mutants, whatever their tests. Tests run in copies of the checkout, with the checkout's .venv.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mutations import draw

HERE = Path(__file__).resolve().parent
LIMIT_S = 60.0
"""Time limit of the tests of one mutant, unless the table gives its module a `limit_s`."""
FIRST_LIMIT_S = 900.0
"""Time limit of the tests without a mutant; this first run fills the caches."""
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", ".cache", ".hypothesis", ".*_cache", "__pycache__"
)
PYTEST = (
    "pytest",
    "-x",
    "-q",
    "-p",
    "no:cacheprovider",
    "-n",
    "0",
    "-m",
    "not slow and not matrix and not server",
)
OUTCOMES = ("killed", "timeout", "survived", "unfinished")
"""Killed: a test failed. Timeout: no test ended in the last third of the limit. Survived: all tests
passed. Unfinished: the limit ended while tests were still making progress, so the result is
open."""

processes: set[subprocess.Popen[bytes]] = set()


def environment(tree: Path, packages: Sequence[str]) -> dict[str, str]:
    """Environment variables of tests in `tree`: its packages come first, and HOME is an empty
    folder.

    CI=1 makes hypothesis draw the same examples in each run.
    """
    dropped = ("XDG_", "PYTEST_", "JAX_COMPILATION_CACHE", "ENGINEBAY_", "PYTHON", "HYPOTHESIS_")
    own = {"HOME": tree.parent / "home", "TMPDIR": tree.parent / "tmp"}
    for folder in own.values():
        folder.mkdir(exist_ok=True)
    path = os.pathsep.join(str(tree / package) for package in packages)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return (
        kept | {name: str(folder) for name, folder in own.items()} | {"PYTHONPATH": path, "CI": "1"}
    )


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its group. The process itself may have ended already."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def run_tests(tree: Path, module: dict[str, Any], python: str, limit_s: float) -> dict[str, Any]:
    """Run a module's tests until one fails; return outcome, seconds and the failed test."""
    command = [
        python,
        "-m",
        *PYTEST,
        "-o",
        f"faulthandler_timeout={module['limit_s'] / 3}",
        *module["tests"],
    ]
    command += ["-k", module["select"]] if "select" in module else []
    begun_s = time.monotonic()
    with (tree.parent / "out").open("w+b") as out, (tree.parent / "err").open("w+b") as err:
        folders = environment(tree, module["packages"])
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
        process = subprocess.Popen(command, cwd=tree, env=folders, start_new_session=True, **pipes)
        processes.add(process)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            stood_s = (
                time.time() - os.fstat(out.fileno()).st_mtime
            )  # pytest writes a letter when a test ends
            kill(process)
            process.wait()
            processes.discard(process)
        output, errors = (
            (file.seek(0), file.read().decode("utf-8", "replace"))[1] for file in (out, err)
        )
    result = {"seconds": round(time.monotonic() - begun_s, 1), "code": code}
    if code is None:
        outcome = "timeout" if stood_s >= module["limit_s"] / 3 else "unfinished"
        hung = re.findall(r'File "[^"]*?([^/"]+)", line \d+ in (test_\w+)', errors)
        return result | {"outcome": outcome, "by": "::".join(hung[-1]) if hung else ""}
    if code == 0:
        return result | {"outcome": "survived", "by": ""}
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    by = failed[1] if failed else f"exit code {code}"
    return result | {"outcome": "killed", "by": by, "said": (output + errors)[-2000:]}


def try_mutant(
    base: Path, module: dict[str, Any], mutant: dict[str, Any], python: str
) -> dict[str, Any]:
    """Run the tests in a temporary copy of `base` that has the mutant."""
    with tempfile.TemporaryDirectory(dir=base.parents[1], ignore_cleanup_errors=True) as scratch:
        tree = Path(scratch) / "tree"
        shutil.copytree(
            base, tree, symlinks=True
        )  # keeps the times, by which Python accepts __pycache__
        path = tree / module["path"]
        path.write_bytes(mutant["text"])
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()
        result = {key: value for key, value in mutant.items() if key != "text"}
        return result | run_tests(tree, module, python, module["limit_s"])


def line_of(mutant: dict[str, Any]) -> str:
    """Describe a mutant on one line."""
    return f"{mutant['line']:4} {mutant['operator']:10} {mutant['before']}  ->  {mutant['after']}"


def first_run(base: Path, module: dict[str, Any], python: str) -> dict[str, Any]:
    """Run the tests without a mutant; if slow, run them again to time them with full caches."""
    cold = run_tests(base, module, python, FIRST_LIMIT_S)
    if cold["outcome"] != "survived" or cold["seconds"] < 10:
        return cold
    return run_tests(base, module, python, FIRST_LIMIT_S) | {"cold_seconds": cold["seconds"]}


def try_module(
    base: Path, module: dict[str, Any], mutants: list[Any], python: str, jobs: int
) -> dict[str, Any]:
    """Try all mutants of a module, print each outcome, and return the module's report."""
    without = first_run(base, module, python)
    report = {"path": module["path"], "tests": module["tests"], "without": without, "mutants": []}
    passes = without["outcome"] == "survived"
    print(f"\n{module['name']} ({module['path']}): tests {'pass' if passes else 'FAIL'}", end=" ")
    print(f"without a mutant, in {without['seconds']} s", flush=True)
    if not passes:
        print(without.get("said", ""), without["by"])
        return report
    if without["seconds"] > module["limit_s"] / 2:
        print(f"  more than half of a mutant's {module['limit_s']:.0f} s: name quicker tests")
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(try_mutant, base, module, mutant, python) for mutant in mutants]
        try:
            for one in concurrent.futures.as_completed(waiting):
                result = one.result()
                report["mutants"].append(result)
                print(
                    f"  {result['outcome']:10} {result['seconds']:5.1f} s {line_of(result)}  "
                    f"{result['by']}",
                    flush=True,
                )
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in tuple(processes):
                kill(process)
            raise
    report["mutants"].sort(key=lambda mutant: mutant["line"])
    return report


def print_table(reports: dict[str, dict[str, Any]]) -> None:
    """Print the counts of outcomes per module, then each mutant that survived or is unfinished."""
    print(f"\n{'module':16}{'tests':>10}", *(f"{outcome:>11}" for outcome in OUTCOMES))
    for name, report in reports.items():
        counts = collections.Counter(result["outcome"] for result in report["mutants"])
        print(
            f"{name:16}{report['without']['seconds']:8.1f} s",
            *(f"{counts[outcome]:11}" for outcome in OUTCOMES),
        )
    for outcome in ("survived", "unfinished"):
        for name, report in reports.items():
            for result in report["mutants"]:
                if result["outcome"] == outcome:
                    print(f"{outcome}: {name} {line_of(result)}")
    everything = [result["outcome"] for report in reports.values() for result in report["mutants"]]
    found = sum(outcome in ("killed", "timeout") for outcome in everything)
    print(f"\n{found} of {len(everything)} mutants found")


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 when all mutants were tried, 1 when tests fail without a mutant."""
    parser = argparse.ArgumentParser(prog="mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=HERE.parent, help="the checkout to test")
    parser.add_argument(
        "--table", type=Path, default=HERE / "mutants.toml", help="modules and their tests"
    )
    parser.add_argument("--modules", nargs="+", metavar="NAME", help="these only")
    parser.add_argument("--seed", type=int, help="seed to use in place of the table's")
    parser.add_argument("--count", type=int, help="max mutants per module")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default 2)")
    parser.add_argument(
        "--out", type=Path, default=HERE.parent / ".cache" / "mutants.json", help="the report"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants, and run nothing")
    options = parser.parse_args(arguments)
    root = options.root.resolve()
    table = tomllib.loads(options.table.read_text(encoding="utf-8"))
    modules = {
        m["name"]: {"limit_s": LIMIT_S, "packages": table["packages"]} | m for m in table["module"]
    }
    if unknown := set(options.modules or ()) - modules.keys():
        parser.error(f"no module {', '.join(sorted(unknown))}; modules: {', '.join(modules)}")
    seed = table["seed"] if options.seed is None else options.seed
    own = root / ".venv" / "bin" / "python"
    python = str(own) if own.exists() else sys.executable
    reports: dict[str, dict[str, Any]] = {}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as scratch:
        base = Path(scratch) / "base" / "tree"
        if not options.list:
            shutil.copytree(root, base, symlinks=True, ignore=NOT_COPIED)
        for name in options.modules or modules:
            text = (root / modules[name]["path"]).read_bytes()
            mutants = draw(text, seed, table["count"])[: options.count]
            if options.list:
                print(f"{name} ({modules[name]['path']})", *map(line_of, mutants), sep="\n  ")
                continue
            reports[name] = try_module(base, modules[name], mutants, python, options.jobs)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            whole = {"root": str(root), "seed": seed, "python": python, "modules": reports}
            options.out.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    if reports:
        print_table(reports)
    return int(any(report["without"]["outcome"] != "survived" for report in reports.values()))


if __name__ == "__main__":
    sys.exit(main())
