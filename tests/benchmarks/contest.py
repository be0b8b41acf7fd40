"""What every contestant runs in a process of its own; prints one JSON line per figure."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

Generate = Callable[[list[list[int]], list[int]], list[list[int]]]
"""Prompts and how many tokens each gets -> their new tokens; greedy, end-of-sequence ignored."""

LOWEST_ID, HIGHEST_ID = 300, 4000
DECODE_PROMPT, DECODE_TOKENS, PREFILL_TOKENS, BATCH = 128, 128, 1024, 32


def started() -> float:
    """When this process was created, on the wall clock."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - (uptime - ticks / os.sysconf("SC_CLK_TCK"))


def prompt(seed: int, length: int) -> list[int]:
    """Random token ids."""
    rng = random.Random(seed)
    return [rng.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(length)]


def tell(figure: str, values: list[float]) -> None:
    """One figure: its median and all values."""
    print(
        json.dumps({"figure": figure, "value": statistics.median(values), "all": values}),
        flush=True,
    )


@dataclasses.dataclass(frozen=True)
class Contestant:
    """What is measured; `warm` compiles everything, and `num_compiled` tells how many programs were
    made so far.
    """

    generate: Generate
    warm: Callable[[], None] = lambda: None
    num_compiled: Callable[[], int] = lambda: 0


def run(contestant: Contestant, rounds: int) -> None:
    """Every test of the contest, in order: start, first batch, tokens, decode, prefill, batch,
    memory.

    No prompt begins like another one, so that a cache of prefixes finds nothing.
    """
    generate = contestant.generate
    begin = started()
    generate([prompt(1, 16)], [1])
    tell("start_s", [time.time() - begin])
    before = contestant.num_compiled()
    tell("first_batch_tokens_per_s", [_batch(generate, 0)])
    tell("first_batch_compiled", [contestant.num_compiled() - before])
    start = time.perf_counter()
    contestant.warm()
    tell("warmup_s", [time.perf_counter() - start])
    print(json.dumps({"figure": "tokens", "value": generate([prompt(2, 32)], [32])[0]}), flush=True)
    generate([prompt(3, DECODE_PROMPT)], [8])
    generate([prompt(4, PREFILL_TOKENS)], [1])
    decode, prefill = [], []
    for number in range(rounds):
        one = _seconds(generate, [prompt(100 + 2 * number, DECODE_PROMPT)], [1])
        more = _seconds(generate, [prompt(101 + 2 * number, DECODE_PROMPT)], [1 + DECODE_TOKENS])
        decode.append(DECODE_TOKENS / (more - one))
        prefill.append(
            PREFILL_TOKENS / _seconds(generate, [prompt(200 + number, PREFILL_TOKENS)], [1])
        )
    tell("decode_tokens_per_s", decode)
    tell("prefill_tokens_per_s", prefill)
    before = contestant.num_compiled()
    tell("batch32_tokens_per_s", [_batch(generate, 1 + number) for number in range(rounds)])
    assert contestant.num_compiled() == before, "a warm contestant compiles nothing"
    tell("peak_rss_mib", [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024])
    sys.stdout.flush()


def _batch(generate: Generate, number: int) -> float:
    """Tokens per second of a batch; each number has prompts of its own, all of the same lengths."""
    rng = random.Random(1)
    lengths = [(rng.randint(16, 256), rng.randint(16, 256)) for _ in range(BATCH)]
    prompts = [prompt(1000 * (1 + number) + i, n) for i, (n, _) in enumerate(lengths)]
    outputs = [new for _, new in lengths]
    return sum(outputs) / _seconds(generate, prompts, outputs)


def _seconds(generate: Generate, prompts: list[list[int]], lengths: list[int]) -> float:
    start = time.perf_counter()
    outputs = generate(prompts, lengths)
    elapsed = time.perf_counter() - start
    assert [len(o) for o in outputs] == lengths, "a contestant gave the wrong number of tokens"
    return elapsed
