"""`make bench`: enginebay and transformers in turn on the same weights and the same work; prints a
table of ratios.

Each run is a process of its own, contestants take turns, figures are medians over rounds. The
machine should be idle.

start_s counts from the creation of the process to the first token. The first batch comes next, with
nothing warmed up: what it has to compile is counted, and is in its time, or was read from the cache
of compiled programs. All else is warm.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.models import SIZES, write_model

FIGURES = (
    "decode_tokens_per_s",
    "prefill_tokens_per_s",
    "batch32_tokens_per_s",
    "first_batch_tokens_per_s",
    "start_s",
    "peak_rss_mib",
)
Runs = dict[str, list[dict[str, Any]]]


def main() -> int:
    """Run the contest."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--models", default="S,M", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument(
        "--engines", default="oengine,vinference", help="of enginebay, one contestant each"
    )
    parser.add_argument(
        "--quantized",
        default="",
        help="of enginebay: more contestants, such as int8,int8+int8 (weights, or weights+inputs)",
    )
    parser.add_argument(
        "--compile-cache",
        default="auto",
        help="of enginebay: a folder, auto, or off to compile in every process",
    )
    parser.add_argument("--rounds", type=int, default=2, help="processes of each contestant")
    parser.add_argument("--repeats", type=int, default=3, help="measurements in each process")
    parser.add_argument(
        "--torch-python", default=sys.executable, help="interpreter with torch, for transformers"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(".cache/benchmarks"),
        help="where the random models are kept",
    )
    args = parser.parse_args()
    for size in args.models.split(","):
        for dtype in args.dtypes.split(","):
            folder = write_model(args.folder, size, dtype)
            contestants = {
                "transformers": [
                    args.torch_python,
                    "-m",
                    "tests.benchmarks.with_transformers",
                    str(folder),
                    dtype,
                    str(args.repeats),
                ]
            }
            for engine in args.engines.split(","):
                for form in ("", *filter(None, args.quantized.split(","))):
                    contestants[f"enginebay {engine} {form}".rstrip()] = [
                        sys.executable, "-m", "tests.benchmarks.with_enginebay", str(folder),
                        dtype, str(args.repeats), engine, args.compile_cache, *_choices(form),
                    ]  # fmt: skip
            runs: Runs = {name: [] for name in contestants}
            for _ in range(args.rounds):
                for name, command in contestants.items():
                    runs[name].append(_run(command))
            _print(f"{size} {dtype}", runs)
    return 0


def _choices(form: str) -> list[str]:
    """Arguments of LLM for quantised weights, and inputs where the form has a +."""
    weights, _, inputs = form.partition("+")
    names = {"quantization": weights, "activation_quantization": inputs}
    return [f"{name}={value}" for name, value in names.items() if value]


def _run(command: list[str]) -> dict[str, Any]:
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "2",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["figure"]: line["value"] for line in lines}


def _print(title: str, runs: Runs) -> None:
    print(
        f"\n## {title}\n\n| | {' | '.join(FIGURES)} | compiled for the first batch | "
        f"tokens equal |\n|---|{'---|' * (len(FIGURES) + 2)}"
    )
    reference = runs["transformers"]
    for name, own in runs.items():
        cells = []
        for figure in FIGURES:
            value, theirs = (
                statistics.median(run[figure] for run in each) for each in (own, reference)
            )
            cells.append(
                f"{value:.4g}" if own is reference else f"{value:.4g} ({value / theirs:.2f}x)"
            )
        equal = sum(a == b for a, b in zip(own[0]["tokens"], reference[0]["tokens"], strict=True))
        compiled = statistics.median(run["first_batch_compiled"] for run in own)
        print(
            f"| {name} | {' | '.join(cells)} | {compiled:.0f} | {equal} of "
            f"{len(reference[0]['tokens'])} |",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
