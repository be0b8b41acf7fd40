"""Decoding on a compact copy of the rows' cache beside decoding through page tables, with attention
in plain JAX, which is what a CPU without a C++ compiler has.

    python -m tests.benchmarks.compact_decode --model S

CPU seconds for a token of each row, in turn; run it with `taskset -c 0`.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
import time
from pathlib import Path

from enginebay import LLM, SamplingParams
from enginebay_xla.attention import CAPS, xla_attention
from tests.benchmarks.models import write_model

through_tables = dataclasses.replace(
    xla_attention, name="through_tables", caps=dataclasses.replace(CAPS, compact_decode=False)
)
KERNELS = {"tables": "tests.benchmarks.compact_decode:through_tables", "copies": "xla"}
NUM_TOKENS, MAX_ROWS = 96, 8
CASES = ((1, 100), (1, 800), (6, 100), (6, 350))
"""Rows, and tokens of their prompts."""


def main() -> int:
    """Print a line for each number of rows and length of prompts."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.compact_decode", description=__doc__
    )
    parser.add_argument("--model", default="S", help="a size of tests.benchmarks.models")
    parser.add_argument("--engine", default="oengine")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, default=Path(".cache/benchmarks"))
    args = parser.parse_args()
    model = str(write_model(args.folder, args.model, "float32"))
    llms = {
        name: LLM(
            model, engine=args.engine, kernels={"attention": kernel}, generation_config="none",
            max_model_len=1024, max_num_seqs=MAX_ROWS,
        )
        for name, kernel in KERNELS.items()
    }  # fmt: skip
    print(
        "| rows | prompt | ms through tables | ms on copies | times faster |\n|---|---|---|---|---|"
    )
    for num_rows, length in CASES:
        times: dict[str, list[float]] = {name: [] for name in llms}
        for number in range(args.rounds + 1):  # one to compile
            for name, llm in llms.items():
                seconds = _decode_s(llm, num_rows, length)
                if number:
                    times[name].append(seconds / NUM_TOKENS * 1e3)
        ratio = statistics.median(a / b for a, b in zip(*times.values(), strict=True))
        tables, copies = (statistics.median(each) for each in times.values())
        print(f"| {num_rows} | {length} | {tables:.2f} | {copies:.2f} | {ratio:.2f} |", flush=True)
    return 0


def _decode_s(llm: LLM, num_rows: int, length: int) -> float:
    return _generate_s(llm, num_rows, length, 1 + NUM_TOKENS) - _generate_s(
        llm, num_rows, length, 1
    )


def _generate_s(llm: LLM, num_rows: int, length: int, num_tokens: int) -> float:
    prompts = [[random.randrange(300, 4000) for _ in range(length)] for _ in range(num_rows)]
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    start = time.process_time()
    llm.generate(prompts, params)
    return time.process_time() - start


if __name__ == "__main__":
    sys.exit(main())
