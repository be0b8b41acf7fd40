"""One tree in a comparison of trees (`tests.benchmarks.trees`): runs in a process of its own, with
the packages and the entry points of its tree, and reads what to do from its standard input.

Answers each cell, a line of JSON, with wall seconds and the CPU seconds of all of its threads.
"""

from __future__ import annotations

import functools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable

DECODE_TOKENS, PROMPT_TOKENS, BATCH = 128, 1024, 32
FIRST_TOKEN = {20: 20, 128: 10, 512: 3}
"""Calls in one sample, by tokens of the prompt: a sample takes about as long as the others."""

HOST_TURNS = 60
Run = Callable[[], float | None]
"""A cell: does its work, and returns CPU seconds where it has measured its own."""


def main() -> None:
    """Make an LLM as the first line says, then run the cells that the next ones name."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is not an answer
    options = json.loads(sys.stdin.readline())
    cells = host_cells(options) if options.pop("host") else model_cells(options)
    for line in sys.stdin:
        run = cells[json.loads(line)]
        wall, cpu = time.perf_counter(), time.process_time()
        own = run()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        seconds = (wall, cpu) if own is None else (own, own)
        print(json.dumps(seconds), file=answers, flush=True)


def model_cells(options: dict[str, str]) -> dict[str, Run]:
    """The cells of a model. No two prompts begin alike, so that no prefix is found."""
    from enginebay import LLM, SamplingParams

    warms_up = options.pop("warm_up")
    llm = LLM(**options, generation_config="none", max_model_len=1536, max_num_seqs=BATCH)
    if warms_up:
        llm.warmup()
    rng = random.Random(0)

    def generate(sizes: list[tuple[int, int]]) -> None:
        prompts = [[rng.randrange(300, 4000) for _ in range(length)] for length, _ in sizes]
        params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for _, n in sizes]
        outputs = llm.generate(prompts, params)
        assert [len(o.outputs[0].token_ids) for o in outputs] == [n for _, n in sizes]

    def first_tokens(length: int) -> None:
        for _ in range(FIRST_TOKEN[length]):
            generate([(length, 1)])

    lengths = random.Random(1)
    mixed = [(lengths.randint(16, 128), lengths.randint(16, 128)) for _ in range(BATCH)]
    return {
        "decode": lambda: generate([(16, DECODE_TOKENS)]),
        "prompt": lambda: generate([(PROMPT_TOKENS, 1)]),
        "batch": lambda: generate(mixed),
        **{f"first token, {n}": functools.partial(first_tokens, n) for n in FIRST_TOKEN},
    }


def host_cells(options: dict[str, str]) -> dict[str, Run]:
    """The engine thread's CPU seconds for a decode step, the device's work taken out."""
    from enginebay import LLM
    from tests.benchmarks.host_time import Host

    options.pop("warm_up")
    llm = LLM(**options, generation_config="none", max_model_len=1024, max_num_seqs=BATCH)
    host = Host(llm)

    def measure(num_rows: int) -> float:
        return statistics.median(host.measure(num_rows, HOST_TURNS).cpu_s for _ in range(3))

    return {f"host, {n} rows": functools.partial(measure, n) for n in (1, BATCH)}


if __name__ == "__main__":
    main()
