"""Tests of what the layout promises in addition to its contract, in both engines."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from enginebay_third_party_layout.layout import Int8HeadsLayout

from enginebay import LLM, EngineConfig, SamplingParams
from enginebay.compose.composition import make_plan
from enginebay.errors import UnsupportedError
from enginebay.plugins.registry import load_registry
from enginebay_testing.reference import ReferenceModel
from enginebay_testing.tiny import write_tiny_checkpoint

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "layout": "int8_heads",
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "decode_steps": 4,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_read_is_written_again_bit_by_bit(dtype: str) -> None:
    layout = Int8HeadsLayout(4, 16, 3, 32, dtype)
    slots = np.arange(64, dtype=np.int32)
    k, v = np.random.default_rng(0).normal(size=(2, 64, 3, 32)).astype(dtype)

    @jax.jit
    def twice(k: jax.Array, v: jax.Array) -> Any:
        first = layout.write(layout.init(), slots, k, v)
        return first, layout.write(layout.init(), slots, *layout.read_exact(first, slots))

    first, second = twice(k, v)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_a_layer_takes_a_byte_for_each_value_and_two_for_each_head() -> None:
    sizes = (4, 16, 3, 64, "float32")
    values = 2 * 4 * 16 * 3 * 64
    assert Int8HeadsLayout(*sizes).num_bytes() == values + 2 * values // 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of random weights, whose programs compile fast."""
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), load_registry()))


@pytest.mark.parametrize("engine", ["oengine", "vinference"])
def test_engines_give_the_tokens_of_the_reference(engine: str, model: str) -> None:
    given: dict[str, Any] = SIZES | {"engine": engine}
    with LLM(model, **given) as llm:
        reference = ReferenceModel(llm.plan, llm.engine.executor.weights())
        assert llm.plan.kernels.names["attention.decode"] == "int8_scan"
        assert llm.plan.kernels.names["kv_write"] == "int8_heads"
        # One prompt is longer than a step; the other one begins with the same tokens.
        prompt = np.random.default_rng(1).integers(4, 90, 21).tolist()
        for out in llm.generate([prompt, [*prompt[:18], 7, 11]], GREEDY):
            tokens = out.outputs[0].token_ids
            assert len(tokens) == GREEDY.max_tokens
            assert reference.first_wrong_token(out.prompt_token_ids, tokens, 0.02) is None


def test_logits_are_near_those_of_an_exact_cache(model: str) -> None:
    plans = [
        make_plan(EngineConfig(**(SIZES | {"model": model, "layout": name})))
        for name in ("int8_heads", "hnd")
    ]
    ids = np.random.default_rng(3).integers(4, 90, 40).tolist()
    rounded, exact = (ReferenceModel(plan).logits(ids) for plan in plans)
    rms = np.sqrt(np.mean((rounded - exact) ** 2) / np.mean(exact**2))
    assert 1e-6 < rms < 0.02


def test_a_kernel_of_another_layout_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"xla.*layout int8_heads"):
        make_plan(EngineConfig(**SIZES, kernels={"attention": "xla"}))
