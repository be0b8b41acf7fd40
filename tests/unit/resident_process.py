"""A process with one engine, started by test_resident_memory.py: fills the cache, waits, and prints
as JSON what the engine's memory plan says and what was resident. Its argument names the engine.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from enginebay import LLM, SamplingParams
from enginebay.contracts.engine import Engine
from enginebay_paged.ledger import PageLedger

NUM_ROWS, NUM_TOKENS, NUM_NEW = 8, 1024, 8
IDLE_S = 0.3
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0, ignore_eos=True)

Generate = Callable[[list[list[int]]], object]


def resident_bytes() -> int:
    """Resident bytes of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


@contextmanager
def llm(name: str) -> Iterator[tuple[Engine, Generate]]:
    """An LLM on one of the engines."""
    options = {} if name == "vinference" else {"prefix_idle_s": 0.5}
    sizes = {"max_num_seqs": NUM_ROWS, "max_model_len": NUM_TOKENS, "compile_cache": "off"}
    engine = {"name": name, **options}
    with LLM("demo", engine=engine, idle_release_s=IDLE_S, **sizes) as made:
        yield made.engine, lambda prompts: made.generate(prompts, GREEDY)


@contextmanager
def dashinfer() -> Iterator[tuple[Engine, Generate]]:
    """The engine of a model that DashInfer's API has started; starting compiles all programs."""
    from enginebay_dashinfer import allspark

    engine = allspark.Engine()
    loader = allspark.HuggingFaceModel("demo", "demo", user_set_data_type="float32")
    loader.load_model().read_model_config().serialize_to_memory(engine).free_model()
    target = allspark.TargetDevice.CPU
    builder = loader.create_reference_runtime_config_builder("demo", target, [0], NUM_ROWS)
    config = builder.max_length(NUM_TOKENS).max_prefill_length(NUM_TOKENS).lora_max_num(0).build()
    engine.install_model(config)
    status = engine.start_model("demo")
    assert status == allspark.AsStatus.ALLSPARK_SUCCESS, engine.last_error

    def generate(prompts: list[list[int]]) -> None:
        generation = loader.create_reference_generation_config_builder(config)
        generation.max_length(len(prompts[0]) + NUM_NEW)
        queues = []
        for prompt in prompts:
            status, handle, queue = engine.start_request_ids("demo", loader, prompt, generation)
            assert status == allspark.AsStatus.ALLSPARK_SUCCESS, engine.last_error
            queues.append((handle, queue))
        for handle, queue in queues:
            while queue.GenerateStatus() != allspark.GenerateRequestStatus.GenerateFinished:
                queue.Get()
            engine.release_request("demo", handle)

    loaded = engine._models["demo"].loaded
    assert loaded is not None
    inner = loaded.service.parts.engine
    assert isinstance(inner.ledger, PageLedger)
    for group in inner.ledger.groups.values():
        assert group.store.index is not None
        group.store.index.idle_s = 0.5  # no option of this API, as the next one
    assert loaded.service._loop is not None
    loaded.service._loop._idle.after_s = IDLE_S
    yield inner, generate
    engine.stop_model("demo")
    engine.release_model("demo")


def main(name: str) -> None:
    """Measure: at the start, after a short request, with a full cache, and some time later."""
    with dashinfer() if name == "dashinfer" else llm(name) as (engine, generate):
        memory = engine.memory
        found = {"start_plan": memory.start_bytes, "max_plan": memory.max_bytes}
        found |= {"cache": memory.cache_bytes, "start": resident_bytes()}
        long = [
            [3 + (7 * row + position) % 200 for position in range(NUM_TOKENS - NUM_NEW - 1)]
            for row in range(NUM_ROWS)
        ]
        generate([long[0][:40]])
        generate(long)
        generate([long[0][:40]])
        time.sleep(1.5)
        found["idle"] = resident_bytes()
        generate(long)
        found["full"] = resident_bytes()
        time.sleep(1.5)
        found["idle_again"] = resident_bytes()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
