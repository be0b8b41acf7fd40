"""A process that answers requests of many kinds, and prints what JAX traced, lowered and compiled
in it: `python -m tests.unit.counted_start CACHE_FOLDER ENGINE [MODEL]`. With a model it starts by
the first programs, as a server does, and has a logits processor more.
"""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Iterator
from typing import Any

from jax import monitoring

from enginebay import LLM, SamplingParams
from enginebay_runtime.engine import StepEngine
from enginebay_runtime.layered import LayeredStep
from enginebay_runtime.local import LocalExecutor
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


def requests(*, dry: bool) -> Iterator[tuple[list[list[int]], dict[str, Any]]]:
    """Prompts and sampling parameters; `dry`: also for the logits processor of this name."""
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
    if dry:
        yield [short], greedy | {"processors": {"dry": {}}}


def programs_of(llm: LLM) -> list[Any]:
    assert isinstance(llm.engine, StepEngine)
    assert isinstance(llm.engine.executor, LocalExecutor)
    return list(llm.engine.executor._programs.values())


def main(folder: str, engine: str, model: str = "") -> None:
    """Start, answer, and print the numbers of events and the tokens."""
    found: dict[str, list[str]] = collections.defaultdict(list)

    def record(name: str, _: float, **facts: Any) -> None:
        if name in EVENTS:
            found[EVENTS[name]].append(str(facts.get("fun_name")))

    monitoring.register_event_duration_secs_listener(record)
    more: dict[str, Any] = {"processors": ["logit_bias", "min_tokens", "dry"]} if model else {}
    with LLM(model or str(TINY), engine=engine, compile_cache=folder, **SIZES, **more) as llm:
        llm.warmup(background=bool(model))
        num_layered = sum(isinstance(one, LayeredStep) for one in programs_of(llm))
        if llm.later_compilation is not None:
            assert llm.later_compilation.wait()
        tokens = []
        for prompts, given in requests(dry=bool(model)):
            params = SamplingParams(max_tokens=6, ignore_eos=True, **given)
            outputs = llm.generate(prompts, params)
            tokens += [[list(one.token_ids) for one in each.outputs] for each in outputs]
    print(json.dumps({"events": found, "tokens": tokens, "num_layered": num_layered}))


if __name__ == "__main__":
    main(*sys.argv[1:])
