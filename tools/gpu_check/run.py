"""Checks and measures everything that runs on a GPU, on a machine that has one and no network.

    python3.12 tools/gpu_check/run.py --bundle build/gpu-check      # installs into an environment of its own first
    python tools/gpu_check/run.py --installed --tiny                # the same motions, here and now, with small shapes

Each stage is a process of its own, so that the memory of one is free for the next; one that fails is told of, and the
others go on. The exit code is 1 when one failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
MODELS = ("qwen3-0.6b", "llama-3.1-8b")
ENGINES = ("oengine", "vinference")
STAGES = ("stream", "check", "kernel", "engines", "torch", "host")
TIMEOUT_S = 1500.0

Figure = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, run the stages, print the table, and write the figures as JSON."""
    args = _parse(arguments)
    python = sys.executable if args.installed else str(_install(args.bundle, args.bundle / "env"))
    figures: list[Figure] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="enginebay-gpu-check-") as scratch:
        for name, command in _commands(python, args, Path(scratch)):
            print(f"# {name}: {' '.join(command)}", file=sys.stderr, flush=True)
            environment = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
            if name.startswith("engines"):
                dump = Path(scratch) / "dump" / name.replace(" ", "-")
                flags = f"--xla_dump_to={dump} --xla_dump_hlo_module_re=.*enginebay_decode.*"
                environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
            try:
                done = subprocess.run(
                    command,
                    check=False,
                    cwd=ROOT,
                    env=environment,
                    stdout=subprocess.PIPE,
                    text=True,
                    timeout=args.timeout,
                )
            except subprocess.TimeoutExpired:
                failed.append(f"{name}: not done after {args.timeout:g} s")
                continue
            found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"figure"')]
            figures += [{"stage": name, **figure} for figure in found]
            if name.startswith("engines"):
                figures += [{"stage": name, **figure} for figure in _graphs(dump)]
            if not found and name in ("check", "host"):
                print(done.stdout)
            if done.returncode:
                failed.append(f"{name}: exit code {done.returncode}")
    print(table(figures))
    for text in failed:
        print(f"FAILED  {text}")
    if args.json:
        args.json.write_text(
            json.dumps({"figures": figures, "failed": failed}, indent=1) + "\n", encoding="utf-8"
        )
    return int(bool(failed))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bundle", type=Path, default=ROOT / "build" / "gpu-check", help="what bundle.py made"
    )
    parser.add_argument("--installed", action="store_true", help="use this Python's own packages as they are")
    parser.add_argument("--tiny", action="store_true", help="small shapes, on whatever device there is")
    parser.add_argument("--stages", default=",".join(STAGES), help=f"of {', '.join(STAGES)}")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for a stage")
    args = parser.parse_args(arguments)
    unknown = set(args.stages.split(",")) - set(STAGES)
    if unknown:
        parser.error(f"stages {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    return args


def _install(bundle: Path, folder: Path) -> Path:
    """An environment over this Python's packages, with what the bundle has and they lack. Nothing there is replaced."""
    wheels = sorted(bundle.glob("*.whl"))
    if not wheels:
        raise SystemExit(f"no wheels in {bundle}: run tools/gpu_check/bundle.py where there is a network")
    venv.create(folder, system_site_packages=True, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    wanted = [wheel for wheel in wheels if not _is_there(wheel)]
    pip = [
        str(python),
        "-m",
        "pip",
        "--quiet",
        "--disable-pip-version-check",
        "install",
        "--no-index",
        "--no-deps",
    ]
    subprocess.run([*pip, *map(str, wanted)], check=True)
    return python


def _is_there(wheel: Path) -> bool:
    name = wheel.name.split("-")[0]
    if name == "enginebay":
        return False
    try:
        importlib.metadata.version(re.sub(r"_+", "-", name))
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _commands(python: str, args: argparse.Namespace, scratch: Path) -> list[tuple[str, list[str]]]:
    stages = args.stages.split(",")
    tiny = ["--tiny"] if args.tiny else []
    measure = [python, str(HERE / "measure.py")]
    found: list[tuple[str, list[str]]] = []
    if "stream" in stages:
        found.append(("stream", [*measure, "stream", *tiny]))
    if "check" in stages:
        found.append(("check", [*measure, "check", *tiny]))
    if "kernel" in stages:
        found.append(("kernel", [*measure, "kernel", *tiny]))
    for model in args.models.split(","):
        folder = scratch / model
        for engine in args.engines.split(",") if "engines" in stages else ():
            work = ["--folder", str(folder), "--model", model, "--batches", args.batches, *tiny]
            found.append((f"engines {model} {engine}", [*measure, "engine", "--engine", engine, *work]))
        if "torch" in stages:
            work = ["--folder", str(folder), "--model", model, "--batches", args.batches, *tiny]
            found.append((f"torch {model}", [python, str(HERE / "with_torch.py"), *work]))
    if "host" in stages:
        host = ["-m", "tests.benchmarks.host_time", "--engines", args.engines, "--rows", "1,32,128"]
        found.append(("host", [python, *host]))
    return found


def _graphs(dump: Path) -> list[Figure]:
    """How many CUDA graphs a decode step is, by XLA's own listing of its largest program."""
    texts = [path.read_text(errors="replace") for path in dump.glob("*thunk_sequence_after_thunk_passes*")]
    if not texts:
        return [{"figure": "CUDA graphs of a step", "value": None, "unit": "XLA lists none on this platform"}]
    graphs, others = count_graphs(max(texts, key=len))
    return [
        {"figure": "CUDA graphs of a step", "value": graphs, "unit": f"and {others} launches beside them"},
    ]


def count_graphs(listing: str) -> tuple[int, int]:
    """(command buffers, other thunks) in the body of the first loop of a listing; of the whole where there is none."""
    lines = re.findall(r"^( *)\d+: k(\w+)", listing, re.MULTILINE)
    body = [(len(indent), kind) for indent, kind in lines]
    loop = next((at for at, (_, kind) in enumerate(body) if kind == "While"), None)
    if loop is not None:
        depth = body[loop][0]
        inside = list(itertools.takewhile(lambda line: line[0] > depth, body[loop + 1 :]))
        body = inside or body
    top = min((depth for depth, _ in body), default=0)
    kinds = [kind for depth, kind in body if depth == top]
    return kinds.count("CommandBuffer"), len(kinds) - kinds.count("CommandBuffer")


def table(figures: Sequence[Figure]) -> str:
    """Markdown: a row for each figure."""
    rows = ["| stage | figure | value | of the roofline |", "|---|---|---|---|"]
    for figure in figures:
        value, fraction = figure["value"], figure.get("fraction")
        shown = "-" if value is None else f"{value:,.4g}" if isinstance(value, float) else str(value)
        share = "" if fraction is None else f"{100 * fraction:.0f} %"
        rows.append(
            f"| {figure['stage']} | {figure['figure']} | {shown} {figure.get('unit', '')} | {share} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
