"""A process that compiles all programs of small engines, started by test_resident_memory.py: prints
as JSON what was resident before and after, and what the memory plan says of it. Its argument names
the engine.
"""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp

from enginebay.compose.composition import build, make_plan
from enginebay.config import EngineConfig
from tests.brief import BRIEF, LEAST
from tests.pool import few_sizes
from tests.unit.resident_process import resident_bytes


def warmed(model: str, engine: str) -> dict[str, int]:
    """The plan of an engine, and the bytes that its programs took."""
    config = EngineConfig(
        model=model,
        engine=engine,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        compile_cache="off",
        processors=(),
    )
    made = build(make_plan(config)).engine
    made.make_arrays()
    before = resident_bytes()
    made.warmup()
    found = {"programs": resident_bytes() - before, "runtime_plan": made.memory.runtime_bytes}
    return found | {"programs_plan": made.memory.programs_bytes}


def main(engine: str) -> None:
    """The compiler keeps memory of its first programs, so those of another model are measured."""
    jax.jit(lambda x: x + 1)(jnp.ones(8)).block_until_ready()
    runtime = resident_bytes()
    with few_sizes():
        first, second = warmed(LEAST, engine), warmed(BRIEF, engine)
    kept = max(0, first["programs"] - first["programs_plan"])
    print(json.dumps(second | {"runtime": runtime, "kept": kept}))


if __name__ == "__main__":
    main(sys.argv[1])
