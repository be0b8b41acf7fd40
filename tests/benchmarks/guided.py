"""What guidance costs: the time of a mask, and tokens per second of guided requests beside free
ones, in one run.

    python -m tests.benchmarks.guided --rows 1,8

Rounds take turns, so that a machine that slows down slows all of them; figures are medians. "any
text" are guided requests whose grammar allows everything: what is left is the cost of guidance
without that of shorter texts. "half" has a free row for each guided one.
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
from enginebay.contracts.constraint import Vocabulary
from enginebay.grammar import Structure
from enginebay.text.guides.grammars import choose_grammars
from enginebay.text.guides.guarded import GuardedLibrary
from enginebay.text.guides.guided_grammar import Llguidance

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


SIZE_BYTES = 2048
"""Size of the schema that `print_worker` compiles."""


def print_worker(llm: LLM) -> None:
    """What compiling in the worker process first adds, for schemas of 2 KB, and what its start
    costs.
    """
    grammars = choose_grammars(llm.plan.config)
    size, ends = llm.plan.model.info.vocab_size, llm.plan.checkpoint.token_info.eos_token_ids
    vocabulary = Vocabulary(llm.tokenizer, size, ends)
    alone, guarded = Llguidance(vocabulary), grammars.make(vocabulary)
    assert isinstance(guarded, GuardedLibrary)
    structures = [Structure("json_schema", schema_of(SIZE_BYTES, seed)) for seed in range(40)]
    begun = time.perf_counter()
    guarded.compile(structures[0])
    first_s = time.perf_counter() - begun
    took: dict[str, list[float]] = {"alone": [], "worker first": []}
    for structure in structures[1:]:
        for name, library in (("alone", alone), ("worker first", guarded)):
            begun = time.perf_counter()
            library.compile(structure)
            took[name].append(1e3 * (time.perf_counter() - begun))
    guarded.close()
    more = [b - a for a, b in zip(took["alone"], took["worker first"], strict=True)]
    print(
        f"\ncompiling a schema of {SIZE_BYTES} bytes, ms; the first one, "
        f"with the start of the worker, {1e3 * first_s:.0f}"
    )
    print("| | median | 90 % |\n|---|---|---|")
    for name, values in (*took.items(), ("added by the worker", more)):
        print(f"| {name} | {statistics.median(values):.1f} | {np.percentile(values, 90):.1f} |")


def schema_of(num_bytes: int, seed: int) -> str:
    """An object with as many properties as fit."""
    rng = np.random.default_rng(seed)
    properties: dict[str, Any] = {}
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 40},
        {"type": "integer", "minimum": 0, "maximum": 999},
        {"enum": ["red", "green", "blue"]},
        {"type": "array", "items": {"type": "number"}, "maxItems": 5},
    ]
    while True:
        name = f"property_{rng.integers(10**6)}"
        made = {
            "type": "object",
            "properties": properties | {name: kinds[len(properties) % len(kinds)]},
        }
        text = json.dumps(made | {"required": list(made["properties"])})
        if len(text) > num_bytes:
            return json.dumps(
                {"type": "object", "properties": properties, "required": list(properties)}
            )
        properties = made["properties"]


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.guided", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--engine", default="vinference")
    parser.add_argument("--rows", default="1,8", help="requests at once, a list")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--worker-only", action="store_true", help="only what compiling in the worker adds"
    )
    args = parser.parse_args()
    rows = [int(part) for part in args.rows.split(",")]
    sizes: dict[str, Any] = {
        "max_model_len": 256,
        "max_num_seqs": max(rows),
        "engine": args.engine,
        "generation_config": "none",
    }
    with LLM(args.model, processors=("guided",), **sizes) as llm:
        tokens = llm.plan.checkpoint.token_info
        size = llm.plan.model.info.vocab_size
        print_worker(llm)
        if args.worker_only:
            return 0
        print_masks(llm, Vocabulary(llm.tokenizer, size, tokens.eos_token_ids))
        print_speeds(llm, rows, args.rounds)
    return 0


def print_masks(llm: LLM, vocabulary: Vocabulary) -> None:
    """Compiling, and the masks along texts that are drawn evenly from them, with the library that
    serves requests: both are made in worker processes.
    """
    start = time.perf_counter()
    library = choose_grammars(llm.plan.config).make(vocabulary)
    assert isinstance(library, GuardedLibrary)
    library.compile(STRUCTURES["schema"])
    print(
        f"\n{vocabulary.size} tokens; the library and its workers are made in "
        f"{1e3 * (time.perf_counter() - start):.0f} ms\n"
    )
    print(
        "| grammar | compiled in ms | masks | median us | 99 % us | "
        "most us |\n|---|---|---|---|---|---|"
    )
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
        print(
            f"| {name} | {1e3 * compiled_s:.1f} | {len(times)} | {median:.0f} | {late:.0f} | "
            f"{most:.0f} |"
        )
    library.close()


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
        "\n| rows | "
        + " | ".join(f"{kind} tok/s" for kind in kinds)
        + " |\n|---"
        + "|---" * len(kinds)
        + "|"
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
            f"| {num} | "
            + " | ".join(f"{statistics.median(s):.0f}" for s in speeds.values())
            + " |",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
