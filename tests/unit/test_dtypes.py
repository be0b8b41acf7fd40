"""The computation, the weights and the cache have a dtype each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginebay import LLM, EngineConfig, SamplingParams
from enginebay.compose.composition import make_engine, make_plan
from enginebay.compose.plan import Plan
from enginebay.errors import ConfigError, UnknownNameError, UnsupportedError
from enginebay_testing.reference import ReferenceModel
from tests.brief import LATE
from tests.parity import tiny

SIZES: dict[str, Any] = {
    "model": LATE,
    "engine": "oengine",
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "decode_steps": 4,
}
NARROW = {"weight_dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}


def plan_of(**choices: Any) -> Plan:
    return make_plan(EngineConfig(**(SIZES | choices)))


def test_each_dtype_is_the_computations_unless_it_is_chosen() -> None:
    chosen = {r.setting: (r.chosen, r.why) for r in plan_of(weight_dtype="bfloat16").reasons}
    assert chosen["dtype"] == ("float32", "chosen by name")
    assert chosen["weight_dtype"] == ("bfloat16", "chosen by name")
    assert chosen["kv_cache_dtype"] == ("float32", "the value of dtype")
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        plan_of(kv_cache_dtype="int3")


def test_memory_is_counted_by_the_dtype_of_each() -> None:
    wide, narrow = (make_engine(plan_of(**choices)).memory for choices in ({}, NARROW))
    assert wide.weights_bytes == 2 * narrow.weights_bytes
    pages = {"name": "oengine", "num_pages": 9}
    wide, narrow = (make_engine(plan_of(engine=pages, **c)).memory for c in ({}, NARROW))
    assert wide.cache_bytes == 2 * narrow.cache_bytes


def test_a_kernel_of_one_dtype_alone_is_refused_for_a_narrower_cache() -> None:
    names = plan_of(**NARROW).kernels.names
    assert {names[f"attention.{phase}"] for phase in ("decode", "prefill", "mixed")} == {"xla"}
    with pytest.raises(UnsupportedError, match=r"native.*mixed_dtypes"):
        plan_of(kv_cache_dtype="bfloat16", kernels={"attention": {"decode": "native"}})


@pytest.mark.long
def test_logits_are_f32_whatever_weights_and_cache_are_stored_in() -> None:
    ids = np.random.default_rng(3).integers(4, 2048, 40).tolist()
    plans = [plan_of(**{name: "bfloat16"}) for name in NARROW]
    assert {weight.dtype.name for weight in plans[0].load_weights().values()} == {"bfloat16"}
    exact, by_weights, by_cache = (ReferenceModel(p).logits(ids) for p in (plan_of(), *plans))
    assert by_weights.dtype == by_cache.dtype == np.float32
    np.testing.assert_allclose(by_weights, exact, atol=1e-4)  # the checkpoint is of bfloat16
    rms = np.sqrt(np.mean((by_cache - exact) ** 2) / np.mean(exact**2))
    assert 1e-5 < rms < 0.02


@pytest.mark.long
@pytest.mark.usefixtures("few_sizes_module")
@pytest.mark.parametrize("engine", ["oengine", pytest.param("vinference", marks=pytest.mark.slow)])
def test_engines_give_the_tokens_of_the_reference(engine: str) -> None:
    given: dict[str, Any] = SIZES | NARROW | {"engine": engine}
    with LLM(given.pop("model"), **given) as llm:
        reference = ReferenceModel(llm.plan, llm.engine.executor.weights())
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        for out in llm.generate(["Once upon a time", "The little dog"], params):
            tokens = out.outputs[0].token_ids
            assert reference.first_wrong_token(out.prompt_token_ids, tokens, 0.02) is None


@pytest.mark.slow
@pytest.mark.usefixtures("few_sizes_module")
@pytest.mark.parametrize("engine", ["oengine", "vinference"])
def test_each_cache_group_may_have_a_dtype_of_its_own(engine: str, tmp_path: Path) -> None:
    folder = str(tiny.write_checkpoint(tmp_path, "gemma3-mixed"))
    given = SIZES | {"model": folder, "engine": engine, "kv_cache_dtype": {"window": "bfloat16"}}
    with LLM(given.pop("model"), **given) as llm:
        cache = llm.engine.executor.arrays().cache
        found = {
            group: {a.dtype.name for a in layers[0].values()} for group, layers in cache.items()
        }
        assert found == {"window": {"bfloat16"}, "full": {"float32"}}
        reference = ReferenceModel(llm.plan, llm.engine.executor.weights())
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        prompts = [prompt[:40] for prompt in tiny.prompts()[2:5]]
        for prompt, out in zip(prompts, llm.generate(prompts, params), strict=True):
            assert reference.first_wrong_token(prompt, out.outputs[0].token_ids, 0.05) is None


def test_a_cache_group_that_the_model_does_not_have_is_one_line_of_error() -> None:
    assert plan_of(kv_cache_dtype={"full": "bfloat16"}).model.info.attention["full"].kv_dtype == (
        "bfloat16"
    )
    with pytest.raises(UnknownNameError, match=r"'windo'. Allowed: full\."):
        plan_of(kv_cache_dtype={"windo": "bfloat16"})
    with pytest.raises(ConfigError, match=r"kv_cache_dtype = .*'int3'.*Allowed: auto, float32"):
        plan_of(kv_cache_dtype={"full": "int3"})
