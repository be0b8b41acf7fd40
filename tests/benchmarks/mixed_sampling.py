"""A batch in which every row asks for something else of sampling, against one that is all greedy.

    python -m tests.benchmarks.mixed_sampling --models M --dtypes float32

The same prompts and lengths in turn: all greedy in programs that have no sampler, all greedy in
programs that have everything (as after a warm-up), every row drawn, and every row with parameters
of its own (temperatures, top_k, top_p, min_p, penalties, biases, masks, n-grams, typical_p, DRY,
XTC, mirostat). Every program is compiled before. The machine should be idle.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from enginebay import LLM, SamplingParams
from enginebay.types import StepVariant
from tests.benchmarks.models import write_model

LOWEST_ID, HIGHEST_ID = 300, 4000
TARGET = 0.7
KINDS = ("greedy", "greedy, all compiled", "drawn", "each its own")


def main() -> int:
    """Print a row for each model and dtype."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.mixed_sampling", description=__doc__
    )
    parser.add_argument("--models", default="M", help="demo, or sizes of tests.benchmarks.models")
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--engine", default="oengine")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(".cache/benchmarks"))
    args = parser.parse_args()
    print(f"| tokens/s | {' | '.join(KINDS)} | last / first |\n|---|{'---|' * (len(KINDS) + 1)}")
    for size in args.models.split(","):
        for dtype in args.dtypes.split(","):
            folder = size if size == "demo" else str(write_model(args.folder, size, dtype))
            length = args.prompt + args.tokens + 1
            sizes = {
                "max_model_len": length,
                "max_num_seqs": args.rows,
                "generation_config": "none",
            }
            with LLM(folder, dtype=dtype, engine=args.engine, **sizes) as llm:
                print(f"| {size} {dtype} | {_compare(llm, args)}", flush=True)
    return 0


def _compare(llm: LLM, args: argparse.Namespace) -> str:
    rng = np.random.default_rng(0)
    vocab = llm.plan.model.info.vocab_size
    greedy = [_params(args, number) for number in range(args.rows)]
    drawn = [_params(args, number, temperature=0.9, top_p=0.95) for number in range(args.rows)]
    mixed = [_params(args, number, **_asked(number, vocab)) for number in range(args.rows)]
    programs: dict[Any, Any] = llm.engine.executor._programs
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(args.rounds + 1):  # one to compile
        for kind, params in zip(KINDS, (greedy, greedy, drawn, mixed), strict=True):
            prompts = rng.integers(
                LOWEST_ID, min(HIGHEST_ID, vocab), (args.rows, args.prompt)
            ).tolist()
            kept = dict(programs)
            if kind == "greedy, all compiled" and number:
                for key in [key for key in programs if key[0].variant is not StepVariant.FULL]:
                    del programs[key]
                llm.engine.executor._chosen.clear()
            start = time.perf_counter()
            outputs = llm.generate(prompts, params)
            seconds = time.perf_counter() - start
            programs.update(kept)
            assert all(len(output.outputs[0].token_ids) == args.tokens for output in outputs), (
                "a row ended early"
            )
            if number:
                times[kind].append(args.rows * args.tokens / seconds)
    rates = [statistics.median(times[kind]) for kind in KINDS]
    share = rates[-1] / rates[0]
    verdict = "met" if share >= TARGET else "missed"
    return (
        f"{' | '.join(f'{rate:.0f}' for rate in rates)} | {share:.2f} "
        f"(target {TARGET}: {verdict}) |"
    )


def _params(args: argparse.Namespace, number: int, **asked: Any) -> SamplingParams:
    return SamplingParams(
        **({"max_tokens": args.tokens, "ignore_eos": True, "seed": number} | asked)
    )


def _asked(number: int, vocab: int) -> dict[str, Any]:
    """What row `number` asks for: one of sixteen kinds, with figures of its own."""
    part = number / 64
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.5 + part},
        {"temperature": 1.0, "top_k": 5 + number},
        {"temperature": 0.8, "top_p": 0.5 + part},
        {"temperature": 1.1, "min_p": 0.02 + part / 10},
        {"presence_penalty": 0.5 + part},
        {"temperature": 0.9, "frequency_penalty": 0.3 + part},
        {"repetition_penalty": 1.1 + part},
        {"logit_bias": {number * 7: 2.0, number * 9 + 1: -3.0}},
        {"allowed_token_ids": tuple(range(number, min(vocab, 2000 + number)))},
        {"min_tokens": 8 + number},
        {"no_repeat_ngram_size": 2 + number % 3},
        {"temperature": 1.0, "typical_p": 0.5 + part},
        {"processors": {"dry": {"multiplier": 0.5 + part}}},
        {
            "temperature": 1.0,
            "processors": {"xtc": {"threshold": 0.05 + part / 10, "probability": 0.5}},
        },
        {"temperature": 1.0, "processors": {"mirostat": {"tau": 3.0 + part}}},
    ]
    return kinds[number % len(kinds)]


if __name__ == "__main__":
    sys.exit(main())
