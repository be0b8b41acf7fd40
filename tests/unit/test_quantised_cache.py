"""A quantised cache on engines: what is chosen, counted and refused, and that rows keep their
tokens.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from enginebay import LLM, EngineConfig, SamplingParams
from enginebay.cli import main
from enginebay.compose.composition import make_engine, make_plan
from enginebay.compose.plan import Plan
from enginebay.errors import ConfigError, UnsupportedError
from enginebay.ops.kv_storage import KV_STORAGES
from enginebay_testing.engine_moves import put_and_compare
from enginebay_testing.reference import ReferenceModel
from tests.brief import LATE
from tests.parity import tiny

ENGINES, STORAGES = ("oengine", "vinference"), sorted(KV_STORAGES)
SIZES: dict[str, Any] = {
    "model": LATE,
    "engine": "oengine",
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "decode_steps": 4,
}
WHOLE = {"name": "oengine", "page_size": 16, "num_pages": 9}


def plan_of(**choices: Any) -> Plan:
    return make_plan(EngineConfig(**(SIZES | choices)))


def test_the_choice_has_a_reason_and_the_dtype_of_values_is_the_computations() -> None:
    plan = plan_of(kv_cache_dtype="int8", dtype="bfloat16")
    chosen = {r.setting: (r.chosen, r.why) for r in plan.reasons}
    assert chosen["kv_cache_dtype"] == ("int8", "chosen by name")
    spec = plan.model.info.attention["full"]
    assert (spec.cache_dtype, spec.kv_storage, spec.kv_dtype) == ("int8", "int8", "bfloat16")
    assert spec.stored_as("float32").cache_dtype == "float32"
    assert (
        plan.kernels.names["attention.decode"]
        == plan_of(dtype="bfloat16").kernels.names["attention.decode"]
    )


@pytest.mark.parametrize(("storage", "width"), [("int8", 32 + 2), ("uint4", 16 + 4), ("fp8", 34)])
def test_memory_counts_codes_and_scales(storage: str, width: int) -> None:
    wide, narrow = (
        make_engine(plan_of(engine=WHOLE, kv_cache_dtype=dtype)).memory
        for dtype in ("bfloat16", storage)
    )
    assert wide.cache_bytes * width == narrow.cache_bytes * 64  # heads of 32 values
    given = {"name": "oengine", "page_size": 16, "cache_bytes": wide.cache_bytes}
    engine = make_engine(plan_of(engine=given, kv_cache_dtype=storage))
    assert engine.memory.cache_bytes <= wide.cache_bytes
    assert engine.ledger.num_free_tokens >= int(64 / width * 8) * 16 - 16


def test_explain_names_the_dtype_and_the_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["explain", "--model", LATE, "--set", "engine.num_pages=9", "--cache-dtype", "uint4"]
    assert main([*flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cache"] == {"dtypes": {"full": "uint4"}, "num_tokens": 8 * 64}
    assert main(flags) == 0
    assert "(512 tokens in uint4)" in capsys.readouterr().out


def test_a_kernel_that_does_not_serve_the_storage_is_refused_by_name() -> None:
    paths = {"kernels": {"attention": "tests.unit.unregistered:plain_attention"}}
    with pytest.raises(UnsupportedError, match="does not support cache dtype int8"):
        plan_of(kv_cache_dtype="int8", **paths)
    writers = {"kernels": {"kv_write": "enginebay_xla.kv_write:kv_write"}}
    with pytest.raises(UnsupportedError, match="int8 caches"):
        plan_of(kv_cache_dtype="int8", **writers)


def test_an_unknown_storage_is_one_line_of_error() -> None:
    with pytest.raises(ConfigError, match=r"'int2'.*Allowed: auto, .*int8, uint4, fp8"):
        plan_of(kv_cache_dtype="int2")


@pytest.mark.usefixtures("few_sizes_module")
@pytest.mark.parametrize(
    ("engine", "storage"),
    [
        ("oengine", "int8"),
        *(
            pytest.param(engine, storage, marks=pytest.mark.slow)
            for engine in ENGINES
            for storage in STORAGES
        ),
    ],
)
def test_engines_give_the_tokens_of_the_reference(engine: str, storage: str) -> None:
    given: dict[str, Any] = SIZES | {"engine": engine, "kv_cache_dtype": storage}
    with LLM(given.pop("model"), **given) as llm:
        arrays = llm.engine.executor.arrays().cache["full"][0]
        assert {"k_scales", "v_scales"} <= set(arrays)
        assert arrays["k_scales"].dtype == jnp.bfloat16
        reference = ReferenceModel(llm.plan, llm.engine.executor.weights())
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        prompts = ["Once upon a time", "The little dog"]
        alone = [llm.generate([p], params)[0].outputs[0].token_ids for p in prompts]
        for out, tokens in zip(llm.generate(prompts, params), alone, strict=True):
            assert out.outputs[0].token_ids == tokens
            assert reference.first_wrong_token(out.prompt_token_ids, tokens, 0.02) is None


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("engine", ENGINES)
def test_rows_are_taken_and_put_back_bit_by_bit(engine: str, storage: str) -> None:
    prompt = list(range(20, 41))
    given: dict[str, Any] = SIZES | {"engine": engine, "kv_cache_dtype": storage}
    with LLM(given.pop("model"), **given) as llm:
        for end in (None, 9):
            llm.run_on_engine(functools.partial(put_and_compare, llm.engine, prompt, end))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("engine", ENGINES)
def test_scales_are_split_with_the_heads(
    engine: str, storage: str, devices: int, tmp_path: Path
) -> None:
    folder = str(tiny.write_checkpoint(tmp_path, "qwen3-tied"))
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = [prompt[:40] for prompt in tiny.prompts()[2:5]]
    given: dict[str, Any] = SIZES | {"engine": engine, "kv_cache_dtype": storage}
    found = []
    for num in (1, devices):
        with LLM(**(given | {"model": folder, "mesh": {"tensor": num}})) as llm:
            arrays = llm.engine.executor.arrays().cache["full"][0]
            for name, array in arrays.items():
                shards = {shard.index for shard in array.addressable_shards}
                assert (array.shape[1], len(shards)) == (max(2, num), num), name
            found.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
    assert np.mean(np.asarray(found[0]) == np.asarray(found[1])) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES)
def test_preempted_shared_and_drafted_rows_keep_their_tokens(storage: str) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    prompts = [f"Once upon a time there was a {who}" for who in ("cat", "dog", "hen", "fox")]
    base: dict[str, Any] = SIZES | {"kv_cache_dtype": storage, "max_num_seqs": 4}
    small = {"name": "oengine", "page_size": 8, "num_pages": 13, "reserve_all": False}
    found = []
    for more in ({}, {"engine": small}, {"proposer": "ngram"}):
        given = base | more
        with LLM(given.pop("model"), **given) as llm:
            outs = [llm.generate(prompts, params) for _ in range(2)]
            found += [[o.outputs[0].token_ids for o in out] for out in outs]
    assert all(each == found[0] for each in found)


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES)
def test_completions_of_one_prompt_have_the_tokens_of_an_engine_without_pages(
    storage: str,
) -> None:
    """They share the pages of the prompt, and each copies the last one when it continues."""
    params = SamplingParams(n=4, max_tokens=24, temperature=1.0, seed=3, ignore_eos=True)
    base: dict[str, Any] = SIZES | {"kv_cache_dtype": storage, "max_num_seqs": 4}
    found = []
    for engine in ENGINES:
        given = base | {"engine": engine}
        with LLM(given.pop("model"), **given) as llm:
            assert llm.engine.ledger.forks == (engine == "oengine")
            outs = llm.generate(["Once upon a time there was a cat"], params)
            found.append([completion.token_ids for completion in outs[0].outputs])
    assert len({tuple(tokens) for tokens in found[0]}) > 1
    assert found[0] == found[1]
