"""The figures that `enginebay explain` prints are those of a running engine of the same plan.

Others are held elsewhere: the resident memory of a process by test_resident_memory.py, tiers of
prefixes by test_prefix_tiers.py, configurations of kernels by test_tuning.py, plain weights and
caches by test_evaluate.py, and the prompts of a chat by test_explain_chat.py.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest

from enginebay.compose.composition import build, make_plan
from enginebay.config import EngineConfig
from enginebay_dashinfer import allspark
from enginebay_dashinfer.memory import ModelMemory
from enginebay_dashinfer.planning import plan_model
from enginebay_runtime.engine import StepEngine
from enginebay_runtime.local import LocalExecutor
from tests.brief import BRIEF
from tests.pool import few_sizes

Run = Callable[..., tuple[int, str, str]]
ENGINES = ("oengine", "vinference", "esurge")
DASHINFER = "dashinfer"
"""An API that makes the engine "esurge" with options and a number of pages of its own."""
SIZES: dict[str, Any] = {
    "model": BRIEF,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "dtype": "float32",
    "processors": (),
}


def explain(run: Run, folder: Path, config: dict[str, Any], *flags: str) -> str:
    """What explain prints of a configuration."""
    path = folder / "small.toml"
    path.write_text("\n".join(f"{name} = {json.dumps(value)}" for name, value in config.items()))
    code, out, err = run("explain", "--config", str(path), *flags)
    assert (code, err) == (0, "")
    return out


@contextmanager
def running(config: dict[str, Any]) -> Iterator[tuple[StepEngine, LocalExecutor]]:
    """An engine of the configuration, and its executor."""
    engine = build(make_plan(EngineConfig(**config))).engine
    assert isinstance(engine, StepEngine)
    assert isinstance(engine.executor, LocalExecutor)
    yield engine, engine.executor
    engine.close()


@contextmanager
def running_dashinfer(folder: Path) -> Iterator[tuple[StepEngine, LocalExecutor]]:
    """The engine that DashInfer makes for SIZES, before its programs are compiled."""
    loader = allspark.HuggingFaceModel(SIZES["model"], "m", user_set_data_type=SIZES["dtype"])
    loader.load_model().read_model_config().serialize_to_path(allspark.Engine(), str(folder))
    builder = loader.create_reference_runtime_config_builder(
        "m", allspark.TargetDevice.CPU, [0], SIZES["max_num_seqs"]
    )
    builder.max_length(SIZES["max_model_len"]).lora_max_num(0)
    builder.max_prefill_length(SIZES["max_num_batched_tokens"])
    with ModelMemory().taking("m", plan_model(builder.build())) as plan:
        engine = build(plan).engine
    assert isinstance(engine, StepEngine)
    assert isinstance(engine.executor, LocalExecutor)
    yield engine, engine.executor
    engine.close()


def num_bytes(arrays: Any) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(arrays))


@pytest.mark.parametrize("engine", [*ENGINES, DASHINFER])
def test_weights_and_cache_are_those_of_the_arrays(run: Run, tmp_path: Path, engine: str) -> None:
    config = SIZES | {"engine": engine}
    made_by = running_dashinfer(tmp_path) if engine == DASHINFER else running(config)
    with made_by as (made, executor):
        config["engine"] = made.parts.config.engine.name
        options = made.parts.config.engine.options.items()
        given = [f"engine.{name}={json.dumps(one)}" for name, one in options if one is not None]
        flags = itertools.chain(*(("--set", one) for one in given))
        found = json.loads(explain(run, tmp_path, config, "--json", *flags))
        memory, stored, cache = found["memory"], found["stored_bytes"], found["cache"]
        weights = num_bytes(executor.weights())
        assert stored["weights"] == memory["weights_bytes"] == weights
        assert memory["cache_bytes"] >= num_bytes(executor.arrays().cache)  # which may grow
        assert cache["num_tokens"] == made.ledger.num_free_tokens > 0
        held = cache["num_tokens"] * stored["cache_of_token"]
        # A paged cache has a page that no row gets.
        assert held <= memory["cache_bytes"] < held + 256 * stored["cache_of_token"]
        assert {str(one.dtype) for one in jax.tree.leaves(executor.arrays().cache)} == {
            *cache["dtypes"].values()
        }
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert weights < memory["device_bytes"] <= total


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
def test_steps_and_working_space_are_those_of_the_programs(
    run: Run, tmp_path: Path, engine: str
) -> None:
    config = SIZES | {"engine": engine, "dump_step": str(tmp_path / "programs")}
    with few_sizes():
        found = json.loads(explain(run, tmp_path, config, "--json"))
        steps = [*found["steps"]["first"], *found["steps"]["later"]]
        with running(config) as (made, executor):
            num_programs = made.warmup()
            assert sorted(map(str, executor.programs)) == sorted(steps)
            assert made.compilations.count == num_programs >= len(steps)
            assert found["memory"]["cache_bytes"] == num_bytes(executor.arrays().cache)
    described = [json.loads(path.read_text()) for path in tmp_path.glob("programs/*.json")]
    largest = max(one["memory"]["temp_size_in_bytes"] for one in described)
    assert largest <= found["memory"]["workspace_bytes"] < 2 * largest


def test_the_text_has_the_figures_of_the_record(run: Run, tmp_path: Path) -> None:
    found = json.loads(explain(run, tmp_path, SIZES, "--json"))
    text = explain(run, tmp_path, SIZES)
    memory, stored, steps = found["memory"], found["stored_bytes"], found["steps"]

    def mib(value: int, places: int = 0) -> str:
        return f"{value / 2**20:.{places}f} MiB"

    tokens = f"{found['cache']['num_tokens']} tokens in float32"
    weights, cache = mib(memory["weights_bytes"]), mib(memory["cache_bytes"])
    runtime, programs = mib(memory["runtime_bytes"]), mib(memory["programs_bytes"])
    space = mib(memory["workspace_bytes"])
    start, most = mib(memory["start_bytes"]), mib(memory["max_bytes"])
    stored_weights, of_token = mib(stored["weights"], 1), f"{stored['cache_of_token']:.0f}"
    for printed in (
        f"memory of each device, {mib(memory['device_bytes'])}:",
        f"weights {weights}, cache up to {cache} ({tokens}), working space {space}",
        f"start about {start}, at most {most}:",
        f"interpreter and libraries {runtime}, compiled programs up to {programs}",
        f"weights take {stored_weights}; a token takes {of_token} bytes of cache",
        f"compiled steps: {len(steps['first']) + len(steps['later'])};",
    ):
        assert printed in text
    shown = re.findall(r"^  (\w+ \d+ .*context \d+)$", text, re.MULTILINE)
    assert shown == steps["first"]


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_cache_that_does_not_fit_is_refused_as_generate_does(
    run: Run, more: tuple[str, ...]
) -> None:
    flags = ("--set", "engine.cache_bytes=900000000000000", "--max-model-len", "64")
    code, out, err = run("explain", *flags, *more)
    assert code == 2
    assert "do not fit the device" in err
    assert "cache" in out
    code, _, same = run("generate", "x", *flags)
    # Engines of other tests in this process are named by generate alone.
    assert (code, same.partition(" do not fit")[0]) == (2, err.partition(" do not fit")[0])
