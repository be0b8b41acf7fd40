"""The op grouped_linear, and models whose MLPs are experts."""

from __future__ import annotations

import collections
from typing import Any

import jax
import numpy as np
import pytest

from enginebay import LLM, EngineConfig, SamplingParams
from enginebay.compose.composition import make_plan
from enginebay.contracts.executor import weight_bytes
from enginebay.errors import CheckpointError, ConfigError
from enginebay.weights import QuantizedArray
from enginebay_models import olmoe, qwen2_moe
from enginebay_models.qwen3_moe import family
from enginebay_testing.reference import ReferenceModel
from enginebay_xla.grouped_linear import grouped_linear, grouped_linear_reference
from tests.parity import tiny
from tests.unit.quantizing import quantized as as_int8

VARIANT = "qwen3_moe-normed"
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "decode_steps": 4,
}


def test_blocks_of_groups_give_what_each_row_gives_alone() -> None:
    rng = np.random.default_rng(0)
    cases = [[0, 3, 1, 0], [9, 0, 0, 40], [0, 0, 0, 0], [130, 1, 7, 300]]
    x = [rng.normal(size=(sum(sizes) + 3, 20)).astype(np.float32) for sizes in cases]
    weight = rng.normal(size=(4, 12, 20)).astype(np.float32)
    sizes = [np.array(case, np.int32) for case in cases]

    @jax.jit
    def both(x: Any, weights: Any, sizes: Any) -> Any:
        return [
            [function(rows, weight, counts) for rows, counts in zip(x, sizes, strict=True)]
            for weight in weights
            for function in (grouped_linear, grouped_linear_reference)
        ]

    plain, exact, quantized, widened = both(x, (weight, as_int8(weight)), sizes)
    for got, wanted in ((plain, exact), (quantized, widened)):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, wanted
        )
    for out, case in zip(plain, cases, strict=True):
        assert out.shape == (sum(case) + 3, 12)
        assert not np.asarray(out)[sum(case) :].any()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size"),
        ({"mlp_only_layers": [1.5]}, "mlp_only_layers"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        family.build(tiny.CONFIGS[VARIANT] | changes, dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write_checkpoint(tmp_path_factory.mktemp("experts"), VARIANT))


def test_experts_that_devices_do_not_divide_are_refused(folder: str) -> None:
    rules = {"kv_heads": None, "mlp": None, "vocab": None}
    plan = make_plan(EngineConfig(model=folder, mesh={"tensor": 3}, axis_rules=rules, **SIZES))
    with pytest.raises(ConfigError, match=r"8 along 'expert', split over 3 devices"):
        plan.load_weights()


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("devices", [2, 4])
def test_each_device_holds_its_share_of_the_experts(
    devices: int, quantization: str, folder: str
) -> None:
    """The memory plan counts as many bytes as each device holds."""
    choices = SIZES | {"quantization": quantization, "mesh": {"tensor": devices}}
    plan = make_plan(EngineConfig(model=folder, **choices))
    experts: dict[Any, int] = collections.Counter()
    every: dict[Any, int] = collections.Counter()
    whole = 0
    specs, weights = plan.model.weight_specs(), plan.load_weights()
    for path, weight in weights.items():
        for array in jax.tree.leaves(weight):
            is_experts = "expert" in specs[path].axes
            whole += array.nbytes if is_experts else 0
            for shard in array.addressable_shards:
                every[shard.device] += shard.data.nbytes
                experts[shard.device] += shard.data.nbytes if is_experts else 0
    assert whole > 0
    assert list(experts.values()) == [whole // devices] * devices
    counted = weight_bytes(plan.model, plan.placement, plan.weight_format)
    assert list(every.values()) == [counted] * devices


@pytest.mark.slow
@pytest.mark.usefixtures("few_sizes_module")
@pytest.mark.parametrize(
    ("engine", "choices"),
    [
        ("oengine", {"mesh": {"tensor": 2}}),
        ("vinference", {"mesh": {"tensor": 4}}),
        ("esurge", {"quantization": "int8"}),
    ],
    ids=["two_devices", "four_devices", "int8"],
)
def test_a_batch_has_the_tokens_of_each_prompt_alone(
    engine: str, choices: dict[str, Any], folder: str
) -> None:
    given: dict[str, Any] = SIZES | choices | {"engine": engine}
    with LLM(folder, **given) as llm:
        weights = llm.engine.executor.weights()
        is_int8 = isinstance(weights["layers.0.mlp.gate"], QuantizedArray)
        assert is_int8 == ("quantization" in choices)
        one = ReferenceModel(make_plan(EngineConfig(model=folder, **SIZES)))
        reference = ReferenceModel(llm.plan, weights) if is_int8 else one
        prompts = [p[:40] for p in tiny.prompts()[1:5]]
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        for prompt, out in zip(prompts, llm.generate(prompts, params), strict=True):
            tokens = out.outputs[0].token_ids
            assert len(tokens) == 8
            assert reference.first_wrong_token(prompt, tokens, 1e-4) is None


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, (None, None, None)),
        ({"use_sliding_window": True}, (16, None, 16)),
        ({"use_sliding_window": True, "max_window_layers": 1}, (16, None, None)),
        ({"use_sliding_window": True, "max_window_layers": 0}, (None, None, None)),
        ({"use_sliding_window": True, "sliding_window": None}, (None, None, None)),
    ],
)
def test_windows_of_qwen2_moe_are_those_of_transformers(
    fields: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    config = {"num_hidden_layers": 3, "sliding_window": 16} | fields
    assert qwen2_moe.windows_of(config, 3) == windows
    with pytest.raises(CheckpointError, match="max_window_layers"):
        qwen2_moe.windows_of(
            config | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": -1}, 3
        )


def test_olmoe_refuses_what_it_does_not_compute() -> None:
    config = tiny.CONFIGS["olmoe-one"]
    assert olmoe.family.build(config | {"clip_qkv": None}, dtype="float32")
    with pytest.raises(CheckpointError, match=r"clip_qkv = 8\.0"):
        olmoe.family.build(config | {"clip_qkv": 8.0}, dtype="float32")
