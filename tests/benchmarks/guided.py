"""What guidance costs: the time of a mask, and tokens per second of guided requests beside free ones, in one run.

    python -m tests.benchmarks.guided --rows 1,8

Rounds take turns, so that a machine that slows down slows all of them; figures are medians. "any text" are guided requests
whose grammar allows everything: what is left is the cost of guidance without that of shorter texts. "half" has a free row for each guided one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import numpy as np

from enginebay import LLM, SamplingParams
from enginebay.constraint import Structure, Vocabulary
from enginebay_samplers.guided_grammar import Llguidance

PROMPT = "Once upon a time"
NUM_TOKENS = 96
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
STRUCTURES = {
    "schema": Structure("json_schema", json.dumps(PERSON)),
    "any object": Structure("json_object", '{"type": "object"}'),
    "regex": Structure("regex", "([a-z]{2,9} ){20,40}"),
    "choice": Structure("choice", json.dumps([f"answer number {i}" for i in range(100)])),
    "Lark": Structure(
        "grammar", 'start: sum\nsum: term (("+" | "-") term)*\nterm: /[0-9]{1,3}/ | "(" sum ")"\n'
    ),
}


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.guided", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--engine", default="vinference")
    parser.add_argument("--rows", default="1,8", help="requests at once, a list")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rows = [int(part) for part in args.rows.split(",")]
    sizes: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": max(rows), "engine": args.engine}
    with LLM(args.model, processors=("guided",), **sizes) as llm:
        tokens = llm.plan.checkpoint.token_info
        size = llm.plan.model.info.vocab_size
        print_masks(Vocabulary(llm.tokenizer, size, tokens.eos_token_ids))
        print_speeds(llm, rows, args.rounds)
    return 0


def print_masks(vocabulary: Vocabulary) -> None:
    """Compiling, and the masks along texts that are drawn evenly from them."""
    start = time.perf_counter()
    library = Llguidance(vocabulary)
    print(
        f"\n{vocabulary.size} tokens; the library is made in {1e3 * (time.perf_counter() - start):.0f} ms\n"
    )
    print("| grammar | compiled in ms | masks | median us | 99 % us | most us |\n|---|---|---|---|---|---|")
    for name, structure in STRUCTURES.items():
        start = time.perf_counter()
        grammar = library.compile(structure)
        compiled_s = time.perf_counter() - start
        rng, times = np.random.default_rng(0), list[float]()
        while len(times) < 1000:
            constraint = grammar.start()
            for _ in range(NUM_TOKENS):
                allowed = np.unpackbits(constraint.bits().view(np.uint8), bitorder="little")
                token_id = int(rng.choice(np.flatnonzero(allowed)))
                start = time.perf_counter()
                constraint.accept(token_id)
                is_done = constraint.is_done
                times.append(1e6 * (time.perf_counter() - start))
                if is_done:
                    break
        median, late, most = np.percentile(times, [50, 99, 100])
        print(f"| {name} | {1e3 * compiled_s:.1f} | {len(times)} | {median:.0f} | {late:.0f} | {most:.0f} |")


def print_speeds(llm: LLM, rows: list[int], rounds: int) -> None:
    """Tokens per second of batches that are guided, half guided and free."""
    free = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=1, ignore_eos=True)
    endless = SamplingParams(**(free.model_dump() | {"regex": "(.|\n)*"}))
    object_ = SamplingParams(**(free.model_dump() | {"json_schema": PERSON}))
    kinds = {
        "free": (free, free),
        "any text": (endless, endless),
        "schema": (object_, object_),
        "half": (object_, free),
    }
    print(
        "\n| rows | " + " | ".join(f"{kind} tok/s" for kind in kinds) + " |\n|---" + "|---" * len(kinds) + "|"
    )
    for num in rows:
        speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(rounds + 1):
            for kind, (one, other) in kinds.items():
                start = time.perf_counter()
                outputs = llm.generate([PROMPT] * num, [(one, other)[i % 2] for i in range(num)])
                spent_s = time.perf_counter() - start
                if turn:  # the first compiles
                    speeds[kind].append(sum(o.num_generated_tokens for o in outputs) / spent_s)
        print(
            f"| {num} | " + " | ".join(f"{statistics.median(s):.0f}" for s in speeds.values()) + " |",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
