"""Time to first token of a prompt whose beginning lies in the cache, against one of which nothing
does.

    python -m tests.benchmarks.prefix_hit --models S,M --dtypes float32

Each round has a beginning of its own, sends it once so that it is cached, then times a prompt that
goes on from it and a prompt as long that is new; the two take turns. Every program is compiled
before. The machine should be idle.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from enginebay import LLM, SamplingParams
from tests.benchmarks.models import write_model

LOWEST_ID, HIGHEST_ID = 300, 4000
TARGET = 5.0
ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)


def main() -> int:
    """Print a row for each model and dtype."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.prefix_hit", description=__doc__
    )
    parser.add_argument("--models", default="S,M", help="demo, or sizes of tests.benchmarks.models")
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--engine", default="oengine")
    parser.add_argument("--tokens", type=int, default=1024, help="length of the prompts")
    parser.add_argument(
        "--cached", type=float, default=0.9, help="the part of it that was sent before"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(".cache/benchmarks"))
    args = parser.parse_args()
    print("| | found in the cache | new ms | cached ms | times faster |\n|---|---|---|---|---|")
    for size in args.models.split(","):
        for dtype in args.dtypes.split(","):
            folder = size if size == "demo" else str(write_model(args.folder, size, dtype))
            with LLM(
                folder,
                dtype=dtype,
                engine=args.engine,
                max_model_len=args.tokens + 16,
                max_num_seqs=2,
                generation_config="none",
            ) as llm:
                print(f"| {size} {dtype} | {_compare(llm, args)}", flush=True)
    return 0


def _compare(llm: LLM, args: argparse.Namespace) -> str:
    shared = round(args.tokens * args.cached)
    highest = min(HIGHEST_ID, llm.plan.model.info.vocab_size)
    rng = np.random.default_rng(0)

    def new(num_tokens: int) -> list[int]:
        return rng.integers(LOWEST_ID, highest, num_tokens).tolist()

    times: dict[str, list[float]] = {"new": [], "cached": []}
    found = 0
    for number in range(args.rounds + 2):  # two to compile and warm up
        beginning = new(shared)
        _first_token(llm, beginning)
        for name, prompt in (
            ("new", new(args.tokens)),
            ("cached", beginning + new(args.tokens - shared)),
        ):
            seconds, num_cached = _first_token(llm, prompt)
            assert bool(num_cached) == (name == "cached"), (
                f"{num_cached} tokens of a {name} prompt were found"
            )
            found = max(found, num_cached)
            if number > 1:
                times[name].append(seconds)
    cold, hit = (statistics.median(seconds) for seconds in times.values())
    verdict = "met" if cold / hit >= TARGET else "missed"
    return (
        f"{found} of {args.tokens} | {cold * 1e3:.2f} | {hit * 1e3:.2f} | "
        f"{cold / hit:.1f} (target {TARGET:.0f}: {verdict}) |"
    )


def _first_token(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Seconds from the call to the first token, and how many of the prompt's tokens were in the
    cache.
    """
    start = time.perf_counter()
    (output,) = llm.generate([prompt], ONE_TOKEN)
    seconds = time.perf_counter() - start
    assert output.metrics is not None, "a request that ended has metrics"
    return seconds, output.metrics.num_cached_tokens


if __name__ == "__main__":
    sys.exit(main())
