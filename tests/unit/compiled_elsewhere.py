"""A process that becomes ready with a few programs, and prints what JAX traced and compiled in it
while the others were made: `python -m tests.unit.compiled_elsewhere MODEL CACHE_FOLDER MODE`.

MODE: "beside" waits for the others, "killed" as well, but the process that compiles them is killed,
and "ended" ends before they are there.
"""

from __future__ import annotations

import collections
import json
import os
import signal
import sys
import time
from typing import Any

from jax import monitoring

from enginebay import LLM, SamplingParams
from enginebay_runtime.local import LocalExecutor
from tests.unit.counted_start import EVENTS, requests
from tests.unit.serving import DEADLOCK_S

SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 32,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 16,
    "decode_steps": 2,
}


def tokens(llm: LLM) -> list[Any]:
    """The answers to the requests."""
    found = []
    for prompts, given in requests(dry=False):
        params = SamplingParams(max_tokens=6, ignore_eos=True, **given)
        found += [[list(o.token_ids) for o in r.outputs] for r in llm.generate(prompts, params)]
    return found


def pid_of(executor: LocalExecutor) -> int:
    """The process that compiles, once it has begun."""
    deadline = time.monotonic() + DEADLOCK_S
    while (pid := executor._process.pid) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return pid


def main(model: str, folder: str, mode: str) -> None:
    """Start, answer, and print the events, the tokens and the process."""
    found: dict[str, list[str]] = collections.defaultdict(list)

    def record(name: str, _: float, **facts: Any) -> None:
        if name in EVENTS:
            found[EVENTS[name]].append(str(facts.get("fun_name")))

    with LLM(model, compile_cache=folder, **SIZES) as llm:
        llm.warmup(background=True)
        executor, later = llm.engine.executor, llm.later_compilation
        assert isinstance(executor, LocalExecutor)
        assert later is not None
        pid = pid_of(executor)
        monitoring.register_event_duration_secs_listener(record)
        if mode == "killed":
            os.kill(pid, signal.SIGKILL)
        if mode == "ended":
            print(json.dumps({"pid": pid, "done": later.is_done}))
            return
        outcome = {"first": tokens(llm)}
        assert later.wait()
        assert executor._process.pid is None, "nothing is left for it"
        outcome |= {"tokens": tokens(llm), "programs": len(executor.programs)}
    print(json.dumps({"events": found, "pid": pid, **outcome}))


if __name__ == "__main__":
    main(*sys.argv[1:])
