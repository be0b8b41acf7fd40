"""Checks and measures everything that runs on a GPU, on a machine with a GPU and without a network.

    # Install into a separate folder first:
    python3.12 tools/gpu_check/run.py --bundle build/gpu-check
    # Run the same stages in this environment, with small shapes:
    python tools/gpu_check/run.py --installed --tiny

Each stage is a separate process, so that its memory is free for the next stage. A stage that fails
is reported, and the other stages still run. When the time of --budget is over or a signal arrives,
the current stage is stopped, and the figures so far are printed. The exit code is 1 when a stage
failed or was left out, and 2 without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from installing import install

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
MODELS = ("qwen3-0.6b", "llama-3.1-8b")
ENGINES = ("oengine", "vinference")
STAGES = ("stream", "check", "kernel", "eval", "engines", "torch", "host")
TIMEOUT_S = 1500.0
DEVICE_TIMEOUT_S = 120.0
"""Time limit for finding the device, so that a hanging driver is reported whatever the
budget is.
"""

CUDA_TOOLS = Path("/usr/local/cuda/bin")
"""Folder of NVIDIA's assembler, which XLA looks for on the path."""

NO_DEVICE = 2

Figure = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, run the stages, print the table, and write the figures as JSON."""
    args = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    environment = _environment()
    ends = math.inf if args.budget is None else time.monotonic() + args.budget
    if not args.installed:
        bundle = args.bundle.resolve()
        folder = install(bundle, bundle / "installed", args.jax_triton)
        paths = [str(folder), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    figures: list[Figure] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="enginebay-gpu-check-") as scratch:
        device = [*_measure("device"), *_tiny(args)]
        problem = _run("device", device, environment, DEVICE_TIMEOUT_S, figures)
        if problem is not None:
            print(f"nothing is measured: {problem}", file=sys.stderr)
            return NO_DEVICE
        try:
            for name, command in _commands(args, args.work or Path(scratch)):
                dump = Path(scratch) / "dump" / name.replace(" ", "-")
                left = min(args.timeout, ends - time.monotonic())
                variables = environment | _more(name, dump, Path(scratch))
                problem = _run(name, command, variables, left, figures)
                if problem is not None:
                    failed.append(f"{name}: {problem}")
                elif name.startswith("engines"):
                    figures.append({"stage": name, **_graphs(dump)})
                if args.json:  # after each stage, so that figures are never lost
                    _write(args.json, figures, failed)
        finally:
            if args.json:
                _write(args.json, figures, failed)
            print(table(figures))
            for text in failed:
                print(f"FAILED  {text}", flush=True)
    return int(bool(failed))


def _environment() -> dict[str, str]:
    """Return our environment variables, with CUDA's tools at the end of the path."""
    found = dict(os.environ)
    if CUDA_TOOLS.is_dir():
        found["PATH"] = os.pathsep.join([*filter(None, [found.get("PATH")]), str(CUDA_TOOLS)])
    return found


def _more(name: str, dump: Path, scratch: Path) -> dict[str, str]:
    """Return extra variables of a stage. For engines, XLA dumps the programs of decode steps, and
    the compilation cache is off, because cached programs are not dumped.

    Autotuned results for matrix products are shared with the following stages.
    """
    if name == "check":  # only the workers need the device's memory
        return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if not name.startswith("engines"):
        return {}
    (scratch / "autotuned").mkdir(exist_ok=True)
    flags = [
        f"--xla_dump_to={dump}",
        "--xla_dump_hlo_module_re=.*enginebay_decode.*",
        f"--xla_gpu_per_fusion_autotune_cache_dir={scratch / 'autotuned'}",
    ]
    return {
        "XLA_FLAGS": " ".join([*filter(None, [os.environ.get("XLA_FLAGS")]), *flags]),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }


def _run(
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    timeout_s: float,
    figures: list[Figure],
) -> str | None:
    """Add the figures that a command prints, as it prints them, and pass its other output on.
    Return an error, or None.
    """
    if timeout_s <= 0:
        return "left out, because no time is left"
    print(f"# {' '.join(command)}", file=sys.stderr, flush=True)
    late = threading.Event()

    def stop() -> None:
        late.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    timer = threading.Timer(timeout_s, stop)
    timer.daemon = True
    timer.start()
    try:
        with process:
            try:
                for line in process.stdout or ():
                    if line.startswith('{"figure"'):
                        figures.append({"stage": name, **json.loads(line)})
                    print(line, end="", file=sys.stderr, flush=True)
            except BaseException:  # kill the process before `with` waits for it
                stop()
                raise
    finally:
        timer.cancel()
    if late.is_set():
        return f"not finished after {timeout_s:g} s"
    return f"exit code {process.returncode}" if process.returncode else None


def _write(path: Path, figures: Sequence[Figure], failed: Sequence[str]) -> None:
    text = json.dumps({"figures": figures, "failed": failed}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bundle",
        type=Path,
        default=ROOT / "build" / "gpu-check",
        help="folder that bundle.py made",
    )
    parser.add_argument(
        "--jax-triton", default="0.4.1", choices=("0.3.1", "0.4.1"), help="version of jax-triton"
    )
    parser.add_argument("--installed", action="store_true", help="use the packages of this Python")
    parser.add_argument("--tiny", action="store_true", help="use small shapes, on any device")
    parser.add_argument("--stages", default=",".join(STAGES), help=f"out of {', '.join(STAGES)}")
    parser.add_argument("--models", default=",".join(MODELS), help=f"out of {', '.join(MODELS)}")
    parser.add_argument(
        "--engines", default=",".join(ENGINES), help=f"such as {', '.join(ENGINES)}"
    )
    parser.add_argument("--batches", default="1,8,32,128", help="rows that decode together")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument(
        "--work", type=Path, help="folder to keep the random checkpoints in for later runs"
    )
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="max seconds per stage")
    parser.add_argument(
        "--budget", type=float, help="max seconds in all; later stages are left out and reported"
    )
    args = parser.parse_args(arguments)
    for name, allowed in (("stages", STAGES), ("models", MODELS)):
        unknown = set(getattr(args, name).split(",")) - set(allowed)
        if unknown:
            parser.error(f"{name} {', '.join(sorted(unknown))}; allowed: {', '.join(allowed)}")
    return args


def _measure(stage: str) -> list[str]:
    return [sys.executable, str(HERE / "measure.py"), stage]


def _tiny(args: argparse.Namespace) -> list[str]:
    return ["--tiny"] if args.tiny else []


def _commands(args: argparse.Namespace, work: Path) -> list[tuple[str, list[str]]]:
    """Return name and command line of every selected stage."""
    stages, tiny = args.stages.split(","), _tiny(args)
    found = [
        (name, [*_measure(name), *tiny]) for name in ("stream", "check", "kernel") if name in stages
    ]
    for model in args.models.split(","):
        folder = str(work / (f"{model}-tiny" if args.tiny else model))
        how = ["--folder", folder, "--model", model, "--batches", args.batches, *tiny]
        if "eval" in stages and model == args.models.split(",")[0]:
            found.append((f"eval {model}", [*_measure("eval"), *how]))
        for engine in args.engines.split(",") if "engines" in stages else ():
            found.append(
                (f"engines {model} {engine}", [*_measure("engine"), "--engine", engine, *how])
            )
        if "torch" in stages:
            found.append((f"torch {model}", [sys.executable, str(HERE / "with_torch.py"), *how]))
    if "host" in stages:
        found.append(("host", [*_measure("host"), "--engines", args.engines, *tiny]))
    return found


def _graphs(dump: Path) -> Figure:
    """Count the CUDA graphs of a decode step in XLA's listing of its largest program."""
    texts = [
        path.read_text(errors="replace")
        for path in dump.glob("*thunk_sequence_after_thunk_passes*")
    ]
    if not texts:
        return {
            "figure": "CUDA graphs of a step",
            "value": None,
            "unit": "XLA lists no graphs on this platform",
        }
    graphs, others = count_graphs(max(texts, key=len))
    return {
        "figure": "CUDA graphs of a step",
        "value": graphs,
        "unit": f"and {others} other launches",
    }


def count_graphs(listing: str) -> tuple[int, int]:
    """Return (command buffers, other thunks) in the body of the first loop of a listing, or in the
    whole listing without a loop.
    """
    lines = re.findall(r"^( *)\d+: k(\w+)", listing, re.MULTILINE)
    body = [(len(indent), kind) for indent, kind in lines]
    loop = next((at for at, (_, kind) in enumerate(body) if kind == "While"), None)
    if loop is not None and "CommandBuffer" in _around(
        body, loop
    ):  # the graph contains all rounds of the loop
        return 1, 0
    if loop is not None:
        depth = body[loop][0]
        inside = list(itertools.takewhile(lambda line: line[0] > depth, body[loop + 1 :]))
        body = inside or body
    top = min((depth for depth, _ in body), default=0)
    kinds = [kind for depth, kind in body if depth == top]
    return kinds.count("CommandBuffer"), len(kinds) - kinds.count("CommandBuffer")


def _around(lines: Sequence[tuple[int, str]], at: int) -> list[str]:
    """Return the kinds of the lines that enclose a line; lines are (indentation, kind)."""
    found, depth = [], lines[at][0]
    for indent, kind in reversed(lines[:at]):
        if indent < depth:
            found.append(kind)
            depth = indent
    return found


def table(figures: Sequence[Figure]) -> str:
    """Return a Markdown table with a row per figure."""
    rows = ["| stage | figure | value | of the roofline |", "|---|---|---|---|"]
    for figure in figures:
        value, fraction = figure["value"], figure.get("fraction")
        shown = (
            "-" if value is None else f"{value:,.4g}" if isinstance(value, float) else str(value)
        )
        share = "" if fraction is None else f"{100 * fraction:.0f} %"
        rows.append(
            f"| {figure['stage']} | {figure['figure']} | {shown} {figure.get('unit', '')} | "
            f"{share} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
