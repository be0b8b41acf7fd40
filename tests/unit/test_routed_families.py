"""Families of routed experts over the shared blocks: routing, tensors, and what they refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from enginebay.compose.composition import make_plan
from enginebay.config import EngineConfig
from enginebay.errors import CheckpointError
from enginebay.weights import QuantizedArray, WeightFormat
from enginebay_models import phimoe
from enginebay_models.experts import ExpertsConfig
from enginebay_models.source import CheckpointSource
from tests.adapters import write_adapter
from tests.parity import tiny


def build(name: str, **fields: Any) -> Any:
    config = tiny.CONFIGS[f"{name}-one"] | fields
    return tiny.family_of(name).build(config, dtype="float32")


LONG: dict[str, Any] = tiny.CONFIGS["phimoe-one"]["rope_scaling"]


def routed(
    config: ExpertsConfig, scores: np.ndarray, correction: np.ndarray
) -> tuple[list[int], np.ndarray]:
    """The experts of one token and their weights, one after the other, in float64."""
    shares = (
        1 / (1 + np.exp(-scores))
        if config.scoring == "sigmoid"
        else np.exp(scores) / np.exp(scores).sum()
    )
    choice = shares + correction
    size = config.num_experts // config.num_groups
    of_groups = [
        sum(sorted(choice[first : first + size])[-config.best_of_group :])
        for first in range(0, config.num_experts, size)
    ]
    best = np.argsort(of_groups)[::-1][: config.num_chosen_groups]
    allowed = [i for i in range(config.num_experts) if i // size in best]
    ids = sorted(allowed, key=lambda i: -choice[i])[: config.num_chosen]
    weights = shares[ids]
    if config.is_normed:
        weights = weights / (max(weights.sum(), config.least_sum) + config.added_to_sum)
    return ids, weights * config.scale


@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(
    ("scoring", "groups", "best"), [("sigmoid", 4, 2), ("sigmoid", 1, 2), ("softmax", 2, 1)]
)
def test_experts_are_chosen_by_corrected_weights_and_weighted_without(
    scoring: Any, groups: int, best: int, is_normed: bool
) -> None:
    config = ExpertsConfig(
        *(16, 3, 8, is_normed, frozenset()),
        num_groups=groups,
        num_chosen_groups=max(1, groups // 2),
        scale=2.5,
        scoring=scoring,
        correction=(16,),
        best_of_group=best,
        least_sum=0.5,
        added_to_sum=0.125,
    )
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(40, 16)).astype(np.float32)
    correction = rng.normal(size=16).astype(np.float32)
    weights, ids = jax.jit(config.route)(scores, correction)
    plain_ids = jax.jit(config.route)(scores, np.zeros(16, np.float32))[1]
    assert np.asarray(plain_ids != ids).any()
    for row, own, chosen in zip(scores, np.asarray(weights), np.asarray(ids), strict=True):
        wanted_ids, wanted = routed(config, row.astype(np.float64), correction)
        assert chosen.tolist() == wanted_ids
        np.testing.assert_allclose(own, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy'. Allowed: noaux_tc"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group = 5. Allowed: 1 to 4"),
        ("dots1", {"n_shared_experts": None}, "n_shared_experts = null. Allowed: a positive"),
        ("dots1", {"num_experts_per_tok": None}, "num_experts_per_tok = null. Allowed: a positive"),
        ("dots1", {"num_local_experts": 4}, "num_local_experts = 4. Allowed: n_routed_experts"),
        ("dots1", {"max_window_layers": None}, "max_window_layers = null. Allowed: a whole number"),
        (
            "dots1",
            {"sliding_window": None, "layer_types": ["sliding_attention"] * 2},
            "layer_types = ",
        ),
        ("ernie4_5_moe", {"moe_k": 9}, "moe_k = 9. Allowed: 1 to 8"),
        ("ernie4_5_moe", {"num_experts": 4}, "num_experts = 4. Allowed: moe_num_experts, which"),
        ("ernie4_5_moe", {"moe_layer_start_index": -1}, "moe_layer_start_index = -1. Allowed: a"),
        ("ernie4_5_moe", {"moe_layer_end_index": None}, "moe_layer_end_index = null"),
        ("ernie4_5_moe", {"moe_norm_min": 0}, "moe_norm_min = 0. Allowed: a positive number"),
        ("glm4_moe", {"n_group": 3}, "n_group = 3. Allowed: a divisor of n_routed_experts = 8"),
        ("glm4_moe", {"n_group": 8}, "n_group = 8. Allowed: a divisor of n_routed_experts = 8"),
        ("glm4_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok = 5. Allowed: 1 to 4"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func = 'softmax'. Allowed: sigmoid"),
        ("glm4_moe", {"first_k_dense_replace": 0.5}, "first_k_dense_replace = 0.5"),
        (
            "glm4_moe_lite",
            {"mlp_layer_types": ["sparse"]},
            "a list of dense or sparse for each of 2",
        ),
        ("glm4_moe_lite", {"first_k_dense_replace": 2}, "first_k_dense_replace = 2. Allowed: the"),
        ("minimax_m2", {"rotary_dim": 25}, "rotary_dim = 25. Allowed: 1 to 24"),
        ("minimax_m2", {"partial_rotary_factor": 0.25}, "rotary_dim = 12. Allowed: 6, as partial"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm = False. Allowed: true, or absent"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window = null. Allowed: a positive"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit = 0. Allowed: a positive number"),
        ("gpt_oss", {"num_experts": 4}, "num_experts = 4. Allowed: num_local_experts, which is 8"),
        ("granitemoe", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9. Allowed: 1 to 8"),
        (
            "granitemoeshared",
            {"shared_intermediate_size": -1},
            "shared_intermediate_size = -1. Allowed: a whole number from 0",
        ),
        ("granitemoeshared", {"shared_intermediate_size": None}, "_size = null. Allowed: a whole"),
        ("lfm2_moe", {"layer_types": None}, "layer_types = null. Allowed: 2 of full_attention or"),
        ("lfm2_moe", {"num_dense_layers": -1}, "num_dense_layers = -1. Allowed: a whole number"),
        ("lfm2_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9. Allowed: 1 to 8"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok = 3. Allowed: 2, or absent"),
        ("phimoe", {"router_jitter_noise": -0.1}, "router_jitter_noise = -0.1. Allowed: a number"),
        ("phimoe", {"router_jitter_noise": None}, "router_jitter_noise = null. Allowed: a number"),
        (
            "phimoe",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling.rope_type = 'linear'. Allowed: default, longrope",
        ),
        ("phimoe", {"rope_scaling": LONG | {"long_mscale": 0}}, "rope_scaling.long_mscale = 0"),
        (
            "phimoe",
            {"rope_scaling": LONG, "rope_parameters": LONG | {"short_mscale": None}},
            "no rope_parameters.short_mscale",
        ),
    ],
)
def test_a_field_that_a_family_does_not_serve_is_named(
    name: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        build(name, **fields)


def test_layers_of_ernie_have_experts_as_config_json_says() -> None:
    fields = {"num_hidden_layers": 6, "moe_layer_start_index": 1, "moe_layer_end_index": 4}
    for changes, expected in (
        ({}, {1, 2, 3, 4}),
        ({"moe_layer_interval": 2}, {1, 3}),
        ({"moe_layer_end_index": -1}, {1, 2, 3, 4, 5}),
        ({"moe_layer_end_index": 9}, {1, 2, 3, 4, 5}),
    ):
        specs = build("ernie4_5_moe", **(fields | changes)).weight_specs()
        assert {int(path.split(".")[1]) for path in specs if path.endswith("router")} == expected
    without = build("ernie4_5_moe", moe_num_shared_experts=0).weight_specs()
    assert "layers.1.mlp.router" in without
    assert not any("shared" in path for path in without)


def test_tensors_of_later_layers_are_no_fault_over_devices_and_with_adapters(
    tmp_path: Path,
) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model", "glm4_moe-one")
    file = folder / "model.safetensors"
    later = {"model.layers.2.eh_proj.weight": np.ones(3, np.float32)}
    save_file(load_file(file) | later, file)
    adapter = str(write_adapter(tmp_path / "a", folder, targets=["q_proj"]))
    for fields in ({"mesh": {"tensor": 2}}, {"lora": {"a": adapter}}):
        plan = make_plan(EngineConfig(model=str(folder), dtype="float32", **fields))  # type: ignore[arg-type]
        assert "lm_head" in plan.load_weights()


def test_corrections_stay_in_float32_and_later_layers_are_not_read(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path, "glm4_moe-one")
    file = folder / "model.safetensors"
    tensors = load_file(file)

    def loaded(more: str) -> dict[str, Any]:
        save_file(tensors | {more: np.ones(3, np.float32)}, file)
        source = CheckpointSource(str(folder))
        model = tiny.family_of("glm4_moe").build(source.config, dtype="bfloat16")
        form = WeightFormat("bfloat16")
        return source.load_weights(model, form=form, place=lambda *_: None)

    weights = loaded("model.layers.2.eh_proj.weight")
    exact = {path for path, one in weights.items() if one.dtype == "float32"}
    assert exact == {"layers.1.mlp.routed.router", "layers.1.mlp.routed.correction"}
    stored = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    np.testing.assert_array_equal(weights["layers.1.mlp.routed.correction"], stored)
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.eh_proj"):
        loaded("model.layers.3.eh_proj.weight")
    config = tiny.CONFIGS["glm4_moe-one"] | {"num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.eh_proj"):
        loaded("model.layers.2.eh_proj.weight")


def test_gates_and_ups_of_one_tensor_are_quantised_and_split_by_experts(tmp_path: Path) -> None:
    folder = str(tiny.write_checkpoint(tmp_path, "granitemoe-one"))
    fields: dict[str, Any] = {"dtype": "float32", "quantization": "int8", "mesh": {"tensor": 4}}
    weights = make_plan(EngineConfig(model=folder, **fields)).load_weights()
    gate = weights["layers.0.mlp.gate"]
    assert isinstance(gate, QuantizedArray)
    assert gate.shape == (8, 2 * 96, 64)
    assert {one.data.shape for one in gate.values.addressable_shards} == {(2, 2 * 96, 64)}
    assert "layers.0.mlp.up" not in weights


def test_rotary_features_of_deepseek_v3_are_reordered_only_if_pairs_are_neighbours() -> None:
    rows = np.arange(4 * 20)[:, None] * np.ones((1, 28), int)
    whole = (slice(None),) * 3
    neighbours, halves = (
        build("deepseek_v3", rope_interleave=one)
        .tensor_sources()["layers.0.attention.q"]
        .build([rows], whole)[0, :, 0]
        for one in (True, False)
    )
    assert halves.tolist() == list(range(20))
    assert neighbours.tolist() == [*range(12), 12, 14, 16, 18, 13, 15, 17, 19]


def test_gates_and_ups_of_gpt_oss_take_turns_in_the_checkpoint() -> None:
    sources = build("gpt_oss").tensor_sources()
    weight, bias = (sources[f"layers.0.mlp.gate_up{one}"] for one in ("", "_bias"))
    tensor = np.arange(8 * 64 * 192).reshape(weight.shapes[0])
    gates, ups = (np.swapaxes(tensor[:, :, first::2], 1, 2) for first in (0, 1))
    whole = np.concatenate([gates, ups], axis=1)
    row = tensor[:, 0]
    for index in ((slice(None),) * 3, (slice(2, 4), slice(95, 99), slice(8, 16))):
        np.testing.assert_array_equal(weight.build([tensor], index), whole[index])
        np.testing.assert_array_equal(bias.build([row], index[:2]), whole[:, :, 0][index[:2]])


def test_windows_of_gpt_oss_are_in_every_other_layer_from_the_first() -> None:
    info = build("gpt_oss", num_hidden_layers=5).info
    assert [(one.window, one.num_layers) for one in info.groups] == [(16, 3), (None, 2)]
    assert {spec.inputs for spec in info.attention.values()} == {("sinks",)}


def test_shared_experts_of_granite_are_one_mlp_with_names_of_its_own_or_none() -> None:
    sources = build("granitemoeshared").tensor_sources()
    found = {
        path.rpartition(".")[2]: source.names
        for path, source in sources.items()
        if path.startswith("layers.1.mlp.shared.")
    }
    assert found == {
        "gate_up": ("model.layers.1.shared_mlp.input_linear.weight",),
        "down": ("model.layers.1.shared_mlp.output_linear.weight",),
    }
    routed = sources["layers.1.mlp.routed.gate"].names
    assert routed == ("model.layers.1.block_sparse_moe.input_linear.weight",)
    without = build("granitemoeshared", shared_intermediate_size=0)
    plain = tiny.family_of("granitemoe").build(
        tiny.CONFIGS["granitemoeshared-one"], dtype="float32"
    )
    assert without.tensor_sources().keys() == plain.tensor_sources().keys()
    assert build("granitemoeshared", shared_intermediate_size=24).info != without.info


@pytest.mark.parametrize(("plain", "sparse"), [(0, {0, 1}), (1, {1}), (2, set()), (9, set())])
def test_layers_of_lfm2_have_experts_after_the_first_ones(plain: int, sparse: set[int]) -> None:
    model = build("lfm2_moe", num_dense_layers=plain)
    assert "added_to_sum=1e-06" in model.info.constants
    names = {name for source in model.tensor_sources().values() for name in source.names}
    for last, layers in (
        ("w1.weight", {0, 1} - sparse),
        ("gate.weight", sparse),
        ("expert_bias", sparse),
        ("experts.7.w2.weight", sparse),
    ):
        found = {layer for layer in (0, 1) if f"model.layers.{layer}.feed_forward.{last}" in names}
        assert found == layers


def mixed(scores: np.ndarray, margin: float) -> list[tuple[int, float]]:
    """The two experts of one token and their weights in Phi-3.5-MoE, in float64."""
    found, left = [], list(range(len(scores)))
    for _ in range(2):
        best = max(left, key=lambda i: scores[i])
        near = [
            i
            for i in left
            if scores[best] - scores[i] <= margin * max(abs(scores[i]), scores[best])
        ]
        found.append((best, 1 / np.exp(scores[near] - scores[best]).sum()))
        left.remove(best)
    return found


@pytest.mark.parametrize("margin", [0.0, 0.05, 0.6, 2.0])
@pytest.mark.parametrize("shift", [-3.0, 0.0, 3.0])
def test_two_experts_of_phimoe_are_chosen_one_after_the_other(margin: float, shift: float) -> None:
    config = phimoe.SparseMixerConfig(8, 2, 16, False, frozenset(), margin=margin)
    scores = np.random.default_rng(0).normal(shift, size=(400, 8)).astype(np.float32)
    weights, ids = jax.jit(config.route)(scores)
    wanted = [mixed(row.astype(np.float64), margin) for row in scores]
    assert ids.tolist() == [[expert for expert, _ in row] for row in wanted]
    np.testing.assert_allclose(weights, [[weight for _, weight in row] for row in wanted], 1e-5)
    assert (np.asarray(weights)[:, 0] < 1).any() == (margin > 0)


@pytest.mark.parametrize(
    ("length", "scale", "factors"),
    [(None, 1.2, "short_factor"), (512, 1.2, "short_factor"), (513, 1.4, "long_factor")],
)
@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_the_scale_of_positions_of_phimoe_depends_on_the_length(
    length: int | None, scale: float, factors: str, field: str
) -> None:
    config = tiny.CONFIGS["phimoe-one"] | {"rope_scaling": None, "max_position_embeddings": 2048}
    info = phimoe.family.build(config | {field: LONG}, dtype="float32", max_model_len=length).info
    assert (info.auto_max_model_len, info.max_model_len) == (512, 2048)
    assert f"frequency_divisors={tuple(LONG[factors])}" in info.constants
    assert f"attention_factor={scale}," in info.constants


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, [(None, 1), (16, 1)]),
        ({"sliding_window": None}, [(None, 2)]),
        ({"max_window_layers": 62}, [(None, 2)]),
        ({"layer_types": ["sliding_attention"] * 2}, [(16, 2)]),
        ({"use_sliding_window": False}, [(None, 1), (16, 1)]),
    ],
)
def test_windows_of_dots1_need_no_switch(fields: dict[str, Any], windows: list[Any]) -> None:
    info = build("dots1", **fields).info
    assert [(one.window, one.num_layers) for one in info.groups] == windows
