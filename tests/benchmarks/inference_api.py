"""What the vInference API costs over LLM on the same engine, and whether it leaves the event loop
free.

    python -m tests.benchmarks.inference_api --models M --dtypes float32

Both APIs share the weights of one process and take turns; a figure is the median over rounds, and
the ratio that of the medians. The machine should be idle.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from enginebay import LLM, SamplingParams
from enginebay_vinference import vInference, vInferenceConfig, vInferencePreCompileConfig
from tests.benchmarks.models import write_model

NEW_TOKENS = 128
PROMPT_TOKENS = 128
TICK_S = 0.010


def main() -> int:
    """Print a table for each model and dtype."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.inference_api", description=__doc__
    )
    parser.add_argument("--models", default="M")
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(".cache/benchmarks"))
    args = parser.parse_args()
    batches = [int(b) for b in args.batches.split(",")]
    for size in args.models.split(","):
        for dtype in args.dtypes.split(","):
            folder = write_model(args.folder, size, dtype)
            print(f"\n## {size} {dtype}\n\n| | LLM s | vInference s | ratio |\n|---|---|---|---|")
            with LLM(
                str(folder),
                dtype=dtype,
                engine="vinference",
                max_model_len=512,
                max_num_seqs=max(batches),
                generation_config="none",
            ) as llm:
                inference = vInference(llm, None, vInferenceConfig(max_new_tokens=NEW_TOKENS))
                for batch in batches:
                    inference.precompile(vInferencePreCompileConfig(batch, PROMPT_TOKENS))
                    _compare(llm, inference, batch, args.rounds)
                print(f"\nticker: {_ticks(inference)}", flush=True)
    return 0


def _compare(llm: LLM, inference: vInference, batch: int, rounds: int) -> None:
    prompts = np.random.default_rng(batch).integers(3, 4000, (batch, PROMPT_TOKENS))
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    tokens: dict[str, Any] = {}

    def by_llm() -> None:
        outputs = llm.generate(prompts.tolist(), params)
        tokens["llm"] = [output.outputs[0].token_ids for output in outputs]

    def by_inference() -> None:
        state = None
        for state in inference.generate(prompts, sampling_params=params):  # noqa: B007
            pass
        assert state is not None
        tokens["inference"] = np.asarray(state.sequences)[:batch, -NEW_TOKENS:].tolist()

    times: dict[Callable[[], None], list[float]] = {by_llm: [], by_inference: []}
    for number in range(rounds + 2):  # two to warm up
        for run, taken in times.items():
            start = time.perf_counter()
            run()
            if number > 1:
                taken.append(time.perf_counter() - start)
    first, second = (statistics.median(taken) for taken in times.values())
    same = sum(a == b for a, b in zip(tokens["llm"], tokens["inference"], strict=True))
    print(
        f"| {batch} x {PROMPT_TOKENS} + {NEW_TOKENS} | {first:.3f} | {second:.3f} | "
        f"{second / first:.3f} ({same} of {batch} equal) |",
        flush=True,
    )


def _ticks(inference: vInference) -> str:
    """How late a coroutine that wants to run every 10 ms is, while prompts keep both cores busy."""
    prompts = ["w5 " * PROMPT_TOKENS] * 8

    async def measure() -> list[float]:
        work = asyncio.ensure_future(
            inference.process_prompts_concurrently(
                prompts, 2, SamplingParams(max_tokens=64, ignore_eos=True)
            )
        )
        late = []
        while not work.done():
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            late.append(time.perf_counter() - due)
        assert all(output.error is None for output in work.result())
        return late

    late = sorted(asyncio.run(measure()))
    return (
        f"{len(late)} ticks of {TICK_S * 1e3:.0f} ms, late by {statistics.median(late) * 1e3:.2f} "
        f"ms at the median, {late[int(len(late) * 0.99)] * 1e3:.1f} ms at the 99th percentile, "
        f"{late[-1] * 1e3:.1f} ms at most"
    )


if __name__ == "__main__":
    sys.exit(main())
