"""A process that answers requests of many kinds, and prints what JAX traced, lowered and compiled
in it: `python -m tests.unit.counted_start CACHE_FOLDER ENGINE`.
"""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Iterator
from typing import Any

from jax import monitoring

from enginebay import LLM, SamplingParams
from tests.brief import TINY

EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "traced",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowered",
    "/jax/core/compile/backend_compile_duration": "compiled",
}

SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 32,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 16,
}


def requests() -> Iterator[tuple[list[list[int]], dict[str, Any]]]:
    """Prompts and sampling parameters."""
    short, long = [3, 5, 9], list(range(2, 26))
    greedy: dict[str, Any] = {"temperature": 0.0}
    yield [short], greedy
    yield [long, short], greedy
    yield [long], {"temperature": 0.8, "seed": 1}
    yield [short, long], {"temperature": 0.8, "top_p": 0.5, "top_k": 7, "seed": 2, "n": 2}
    yield [short], {"frequency_penalty": 0.5, "presence_penalty": 0.1, "seed": 3}
    yield [short, long], greedy | {"logprobs": 3}
    yield [short], greedy | {"logit_bias": {5: 4.0}, "min_tokens": 3}
    yield [short], greedy | {"stop_token_ids": [7]}


def main(folder: str, engine: str) -> None:
    """Start, answer, and print the numbers of events and the tokens."""
    found: dict[str, list[str]] = collections.defaultdict(list)

    def record(name: str, _: float, **facts: Any) -> None:
        if name in EVENTS:
            found[EVENTS[name]].append(str(facts.get("fun_name")))

    monitoring.register_event_duration_secs_listener(record)
    with LLM(str(TINY), engine=engine, compile_cache=folder, **SIZES) as llm:
        llm.warmup()
        tokens = []
        for prompts, given in requests():
            params = SamplingParams(max_tokens=6, ignore_eos=True, **given)
            outputs = llm.generate(prompts, params)
            tokens += [[list(one.token_ids) for one in each.outputs] for each in outputs]
    print(json.dumps({"events": found, "tokens": tokens}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
