"""What adapters cost: 32 rows of a model without slots, with slots that no row uses, and with slots
that rows use, each row one of the adapters or none.

    python -m tests.benchmarks.adapters --models M --dtypes float32

The same prompts in turn; the ratios are medians over the rounds of the seconds for a decoded token
of each row, in wall time and in CPU time. Every program is compiled before.
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
from tests.adapters import write_adapter
from tests.benchmarks.models import write_model

KINDS = ("no slots", "idle slots", "slots in use")


def main() -> int:
    """Print a row for each model and dtype."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.adapters", description=__doc__
    )
    parser.add_argument("--models", default="M", help="sizes of tests.benchmarks.models")
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--kernel", default="auto", help="the implementation of the op lora")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16, help="decoded tokens of each request")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, default=Path(".cache/benchmarks"))
    args = parser.parse_args()
    print("| | ms of a step | idle slots: wall, CPU | slots in use: wall, CPU |\n|---|---|---|---|")
    for size in args.models.split(","):
        for dtype in args.dtypes.split(","):
            print(f"| {size} {dtype} | {_compare(args, size, dtype)}", flush=True)
    return 0


def _compare(args: argparse.Namespace, size: str, dtype: str) -> str:
    model = write_model(args.folder, size, dtype)
    folders = [
        write_adapter(args.folder / f"{size}-adapter-{i}", model, seed=i, rank=args.rank)
        for i in range(args.adapters)
    ]
    fields: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": 128,
        "max_num_seqs": args.rows,
        "generation_config": "none",
    }
    slots = {"max_loras": args.adapters, "max_lora_rank": args.rank}
    slots |= {"kernels": {"lora": args.kernel}}
    used = {f"adapter-{i}": str(folder) for i, folder in enumerate(folders)}
    names: list[str | None] = [None, *used]
    llms = [LLM(str(model), **fields), LLM(str(model), **fields, **slots)]
    llms.append(LLM(str(model), **fields, **slots, lora=used))
    asked = [None, None, [names[i % len(names)] for i in range(args.rows)]]
    times: list[list[tuple[float, float]]] = [[] for _ in KINDS]
    for number in range(args.rounds + 1):  # one to compile
        for place in range(len(KINDS)):
            kind = (place + number) % len(KINDS)  # each kind is the first as often as the others
            seconds = _decode_s(llms[kind], asked[kind], args, number)
            if number:
                times[kind].append(seconds)
    for llm in llms:
        llm.close()
    base, *others = times
    cells = [f"{1e3 * statistics.median(wall for wall, _ in base):.1f}"]
    for of_kind in others:
        ratios = [
            [pair[one] / before[one] for pair, before in zip(of_kind, base, strict=True)]
            for one in (0, 1)
        ]
        cells.append(", ".join(f"{statistics.median(each):.3f}" for each in ratios))
    return f"{' | '.join(cells)} |"


def _decode_s(
    llm: LLM, lora: list[str | None] | None, args: argparse.Namespace, seed: int
) -> tuple[float, float]:
    """Return the wall seconds and the CPU seconds of a decode step."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(300, 4000, (args.rows, 16)).tolist()
    found = []
    for num_tokens in (1, 1 + args.tokens):
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        start = time.perf_counter(), time.process_time()
        llm.generate(prompts, params, lora=lora)
        found.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    (wall, cpu), (more_wall, more_cpu) = found
    return (more_wall - wall) / args.tokens, (more_cpu - cpu) / args.tokens


if __name__ == "__main__":
    sys.exit(main())
