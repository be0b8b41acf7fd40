"""Two trees of the project beside each other: speed of one commit against another's.

    git worktree add /tmp/before COMMIT
    python -m tests.benchmarks.trees /tmp/before

Each tree runs in processes of its own, with its own packages and entry points and with the
libraries of this interpreter, or of `--before-python`. In each round every cell is run once by both
trees, in turn and in alternating order. A ratio is the speed of the tree after over that of the
tree before: above 1 it is faster. Printed are the median ratio of the pairs, and the interval that
holds the true median with a probability of at least 95 % whatever the distribution (order
statistics). The cells "paged" compare engine oengine of the tree after with vinference of the same
tree. The cells "host" are CPU time of the engine's thread for a decode step over programs that
compute nothing.

With `--cores 0` the processes share one core and the ratios are of CPU seconds: for a machine that
does other work meanwhile. Programs are compiled before anything is measured, and kept on disk.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

from tests.benchmarks.models import write_model

HERE = Path(__file__).resolve().parents[2]
MODEL_CELLS = (
    "decode", "prompt", "batch", "first token, 20", "first token, 128", "first token, 512",
)  # fmt: skip
HOST_CELLS = ("host, 1 rows", "host, 32 rows")
CONFIDENCE = 0.95


class Worker:
    """A process that runs cells with the code of a tree."""

    def __init__(
        self, tree: Path, metadata: Path, args: argparse.Namespace, **options: Any
    ) -> None:
        _write_metadata(tree, metadata)
        path = [str(metadata), *(str(tree / name) for name in [*_folders(tree), "."])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}
        python = args.before_python if metadata.name == "before" else sys.executable
        command = [python, str(Path(__file__).with_name("tree_worker.py"))]
        if args.cores:
            command = ["taskset", "-c", args.cores, *command]
        self._process = subprocess.Popen(
            command, cwd=tree, env=environment, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=None if args.verbose else subprocess.DEVNULL,
        )  # fmt: skip
        self._send(options | {"warm_up": args.warm_up, "compile_cache": str(args.folder / "jax")})

    def _send(self, message: object) -> None:
        assert self._process.stdin is not None, "it has a pipe"
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def begin(self, cell: str) -> None:
        """Have it run a cell."""
        self._send(cell)

    def seconds(self) -> tuple[float, float]:
        """(wall, CPU) seconds of the cell that was begun."""
        assert self._process.stdout is not None, "it has a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a worker ended: run again with --verbose")
        wall, cpu = json.loads(line)
        return wall, cpu

    def run(self, cell: str) -> tuple[float, float]:
        """Run a cell and wait for it."""
        self.begin(cell)
        return self.seconds()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def main() -> int:
    """Compare the trees and print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.trees", description=__doc__)
    parser.add_argument("before", type=Path, help="the tree that the other is compared with")
    parser.add_argument("after", type=Path, nargs="?", default=HERE, help="by default this one")
    parser.add_argument(
        "--before-python",
        default=sys.executable,
        help="interpreter of the tree before: the same tree twice compares versions of libraries",
    )
    parser.add_argument("--models", default="S,M", help="sizes of tests.benchmarks.models, or none")
    parser.add_argument("--cells", default="", help="only cells whose names contain one of these")
    parser.add_argument("--engine", default="oengine", help="of both trees")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warm-up", action="store_true", help="compile what warmup() compiles")
    parser.add_argument(
        "--cores", default="", help="run there, as taskset -c, and compare CPU time"
    )
    parser.add_argument("--verbose", action="store_true", help="show what the processes print")
    parser.add_argument("--folder", type=Path, default=HERE / ".cache/benchmarks")
    args = parser.parse_args()
    args.folder = args.folder.resolve()
    print("| | before s | after s | ratio | 95 % interval |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        metadata = Path(name)
        for size in filter(None, args.models.split(",")):
            folder = str(write_model(args.folder, size, args.dtype).resolve())
            _compare_models(size, folder, metadata, args)
        _compare_hosts(metadata, args)
    return 0


def _compare_models(size: str, folder: str, metadata: Path, args: argparse.Namespace) -> None:
    cells = _chosen(MODEL_CELLS, args)
    paged = _chosen(("paged over contiguous, decode",), args)
    options = {"host": False, "model": folder, "dtype": args.dtype}
    workers = {}
    if cells:
        workers["before"] = Worker(
            args.before.resolve(), metadata / "before", args, engine=args.engine, **options
        )
        workers["after"] = Worker(
            args.after.resolve(), metadata / "after", args, engine=args.engine, **options
        )
    pairs = {f"{size}: {cell}": (cell, "before", "after") for cell in cells}
    if paged:
        for name in ("vinference", "oengine"):
            workers[name] = Worker(
                args.after.resolve(), metadata / "after", args, engine=name, **options
            )
        pairs[f"{size}: {paged[0]}"] = ("decode", "vinference", "oengine")
    _compare(workers, pairs, args)


def _compare_hosts(metadata: Path, args: argparse.Namespace) -> None:
    cells = _chosen(HOST_CELLS, args)
    if not cells:
        return
    options = {"host": True, "model": "demo", "engine": args.engine, "scheduler": "fcfs"}
    workers = {
        name: Worker(tree.resolve(), metadata / name, args, **options)
        for name, tree in (("before", args.before), ("after", args.after))
    }
    _compare(workers, {cell: (cell, "before", "after") for cell in cells}, args)


def _compare(
    workers: dict[str, Worker], pairs: dict[str, tuple[str, str, str]], args: argparse.Namespace
) -> None:
    """Run all pairs (a cell and two workers) in turn, and print a line for each."""
    for _ in range(2):  # what is to be compiled is compiled, by all of them at once
        for cell, *names in pairs.values():
            for name in names:
                workers[name].begin(cell)
            for name in names:
                workers[name].seconds()
    times: dict[str, list[tuple[float, float]]] = {pair: [] for pair in pairs}
    which = 1 if args.cores else 0
    for number in range(args.rounds):
        for pair, (cell, *names) in pairs.items():
            order = names[:: 1 if number % 2 else -1]
            seconds = {name: workers[name].run(cell)[which] for name in order}
            times[pair].append((seconds[names[0]], seconds[names[1]]))
    for worker in workers.values():
        worker.close()
    for pair, both in times.items():
        before, after = (statistics.median(each) for each in zip(*both, strict=True))
        ratios = sorted(one / other for one, other in both)
        low, high = interval(ratios)
        print(
            f"| {pair} | {before:.4g} | {after:.4g} | {statistics.median(ratios):.3f} | "
            f"{low:.3f} to {high:.3f} |",
            flush=True,
        )


def interval(ordered: list[float]) -> tuple[float, float]:
    """Two of the ascending values, between which the median of their distribution lies with
    CONFIDENCE; the outermost when there are too few.
    """
    num, left_out, outside = len(ordered), 0, 0.0
    while True:
        outside += 2 * math.comb(num, left_out) / 2**num
        if outside > 1 - CONFIDENCE or 2 * left_out >= num - 1:
            break
        left_out += 1
    left_out = max(0, left_out - 1)
    return ordered[left_out], ordered[num - 1 - left_out]


def _chosen(names: tuple[str, ...], args: argparse.Namespace) -> list[str]:
    wanted = [part for part in args.cells.split(";") if part]
    return [name for name in names if not wanted or any(part in name for part in wanted)]


def _folders(tree: Path) -> list[str]:
    """The folders of a tree that packages are imported from."""
    tables = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))
    folders: list[str] = tables["tool"]["hatch"]["build"]["dev-mode-dirs"]
    return folders


def _write_metadata(tree: Path, folder: Path) -> None:
    """The entry points of a tree, as an installed distribution has them, in a folder of
    their own.
    """
    project = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = project["version"]
    info = folder / f"enginebay-{version}.dist-info"
    if info.exists():
        return
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    info.mkdir(parents=True)
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: enginebay\nVersion: {version}\n", encoding="utf-8"
    )


if __name__ == "__main__":
    start = time.monotonic()
    status = main()
    print(f"\n{time.monotonic() - start:.0f} s", file=sys.stderr)
    sys.exit(status)
