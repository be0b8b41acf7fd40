"""Time to first token of prompts that return when the cache holds a quarter of them: from the host
tier, from the disk tier, and recomputed.

    python -m tests.benchmarks.prefix_tiers --model M --dtype float32

Several prompts are sent in turn, in rounds, so that each has left the device when it returns. The
tokens must be the same with and without tiers. Every program is compiled before. The machine should
be idle.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from enginebay import LLM, SamplingParams
from enginebay.outputs import RequestMetrics
from tests.benchmarks.models import write_model

LOWEST_ID, HIGHEST_ID = 300, 4000
TARGET = 3.0
NEW_TOKENS = 8
Run = tuple[list[float], list[list[int]], list[RequestMetrics]]


def main() -> int:
    """Print a row for each tier. Returns 1 when the host tier misses the target, or tokens
    differ.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.prefix_tiers", description=__doc__
    )
    parser.add_argument("--model", default="M", help="a size of tests.benchmarks.models")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cache-dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=1000, help="length of the prompts")
    parser.add_argument("--prompts", type=int, default=8, help="the cache holds a quarter of them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(".cache/benchmarks"))
    args = parser.parse_args()
    model = str(write_model(args.folder, args.model, args.dtype))
    page_size = 64
    pages = -(-(args.tokens + NEW_TOKENS) // page_size) * (args.prompts // 4)
    base = {"name": "oengine", "page_size": page_size, "num_pages": 1 + pages}
    host = {**base, "prefix_host_bytes": 8 * 2**30}
    runs = {"recomputed": _run(model, args, base), "from the host": _run(model, args, host)}
    folder = tempfile.mkdtemp(dir=args.folder)
    try:
        files = {**host, "prefix_disk_dir": folder}
        _run(model, args, files)
        runs["from the disk, after a restart"] = _run(model, args, files, first_only=True)
    finally:
        shutil.rmtree(folder)
    return _report(runs)


def _report(runs: Mapping[str, Run]) -> int:
    cold = statistics.median(runs["recomputed"][0])
    print("| | host tokens | disk tokens | first token ms | times faster |\n|---|---|---|---|---|")
    good = True
    for name, (times, tokens, metrics) in runs.items():
        one = statistics.median(times)
        host, disk = (
            statistics.median(sorted(values))
            for values in (
                [metric.num_host_tokens for metric in metrics],
                [metric.num_disk_tokens for metric in metrics],
            )
        )
        print(f"| {name} | {host:.0f} | {disk:.0f} | {one * 1e3:.1f} | {cold / one:.1f} |")
        expected = runs["recomputed"][1]
        if tokens != expected[: len(tokens)]:
            print(f"{name}: the tokens differ")
            good = False
    faster = cold / statistics.median(runs["from the host"][0])
    print(f"target {TARGET:.0f}: {'met' if faster >= TARGET else 'missed'}")
    return 0 if good and faster >= TARGET else 1


def _run(
    model: str, args: argparse.Namespace, engine: Mapping[str, Any], *, first_only: bool = False
) -> Run:
    """Times, tokens and metrics of returning prompts; of their first round with `first_only`."""
    with LLM(
        model,
        dtype=args.dtype,
        kv_cache_dtype=args.cache_dtype,
        engine=engine,
        max_model_len=args.tokens + 16,
        max_num_seqs=2,
        generation_config="none",
    ) as llm:
        rng = np.random.default_rng(0)
        highest = min(HIGHEST_ID, llm.plan.model.info.vocab_size)
        ids = rng.integers(LOWEST_ID, highest, (args.prompts + 4, args.tokens))
        prompts: Sequence[list[int]] = [row.tolist() for row in ids[4:]]
        for row in (*ids[:4], ids[0], ids[1]):  # compiles what a new and a returning prompt run
            _timed(llm, row.tolist())
        times: list[float] = []
        tokens: list[list[int]] = []
        metrics: list[RequestMetrics] = []
        for number in range(1 if first_only else 1 + args.rounds):
            for prompt in prompts:
                seconds, found, its_metrics = _timed(llm, prompt)
                if number or first_only:
                    times.append(seconds)
                    tokens.append(found)
                    metrics.append(its_metrics)
        return times, tokens, metrics


def _timed(llm: LLM, prompt: list[int]) -> tuple[float, list[int], RequestMetrics]:
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    start, first = time.perf_counter(), 0.0
    found: list[int] = []
    metrics: RequestMetrics | None = None
    for chunk in llm.stream(prompt, params):
        if not first and chunk.delta_token_ids:
            first = time.perf_counter() - start
        found += chunk.delta_token_ids
        metrics = chunk.metrics or metrics
    assert metrics is not None, "the last chunk has metrics"
    return first, found, metrics


if __name__ == "__main__":
    sys.exit(main())
