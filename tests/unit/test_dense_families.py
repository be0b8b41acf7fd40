"""Dense families over the shared blocks: how their tensors lie in weights, and what they refuse."""

from __future__ import annotations

import importlib
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from enginebay.errors import CheckpointError
from enginebay_lora.layers import AdaptedEmbedding, AdaptedLayer, adapted_layers
from enginebay_models import tensors
from enginebay_models.apertus import xielu
from enginebay_models.blocks import QueryScale
from enginebay_models.tensors import QkvRows
from tests.adapters import TARGETS
from tests.unit.test_models_families import CONFIG

SHAPE = (4, 2, 6)
"""KV heads, queries of each, head size; the checkpoint has half as many KV heads."""
NAMES = ("q", "k", "v")


GROWING = {
    "rope_type": "default",
    "llama_4_scaling_beta": 0.5,
    "original_max_position_embeddings": 100,
}
"""A rule of Ministral 3."""


def build(name: str, **fields: Any) -> Any:
    family = importlib.import_module(f"enginebay_models.{name}").family
    given = {"architectures": [family.architectures[0]], **CONFIG, **fields}
    return family.build(
        {key: one for key, one in given.items() if one != "absent"}, dtype="float32"
    )


def separate() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(rows, 3)) for rows in (4 * 2 * 6, 2 * 6, 2 * 6)]


@pytest.mark.parametrize("index", [slice(None), slice(0, 1), slice(1, 3), slice(3, 4)])
def test_rows_of_one_tensor_become_the_weight_of_three(index: slice) -> None:
    """Whole, and in the shards of devices, where each KV head is there twice."""
    parts = separate()
    apart = tensors.fused_qkv(NAMES, SHAPE, repeats=2, features=(3,))
    wanted = apart.build(parts, (index,))
    by_head = [part.reshape(2, -1, 6, 3) for part in parts]
    for place, tensor in (
        ("stacked", np.concatenate(parts)),
        ("grouped", np.concatenate(by_head, axis=1).reshape(-1, 3)),
    ):
        rows: Any = QkvRows(place)
        source = tensors.fused_qkv(("qkv",), SHAPE, repeats=2, features=(3,), qkv_rows=rows)
        assert (source.names, source.shapes) == (("qkv",), (tensor.shape,))
        np.testing.assert_array_equal(source.build([tensor], (index,)), wanted)


def in_blocks(heads: list[np.ndarray]) -> np.ndarray:
    """Of 4 parts of the heads of queries, values and keys [8, 6, 3], one after the other."""
    blocks = [part[first : first + 2] for first in range(0, 8, 2) for part in heads]
    return np.concatenate(blocks).reshape(-1, 3)


@pytest.mark.parametrize("index", [slice(None), slice(0, 1), slice(3, 6)])
@pytest.mark.parametrize("interleaved", [0, 4])
def test_rows_in_blocks_of_heads_become_the_weight_of_three(index: slice, interleaved: int) -> None:
    q, v, k = np.random.default_rng(0).normal(size=(3, 8, 6, 3))
    parts = [one.reshape(-1, 3) for one in (q, k, v)]
    shape = (8, 1, 6)
    apart, blocks = (
        tensors.fused_qkv(names, shape, repeats=1, features=(3,), qkv_rows=QkvRows(*rows))
        for names, rows in ((NAMES, ("apart", interleaved)), (("qkv",), ("blocks", interleaved)))
    )
    assert (blocks.names, blocks.shapes) == (("qkv",), ((144, 3),))
    found = blocks.build([in_blocks([q, v, k])], (index,))
    np.testing.assert_array_equal(found, apart.build(parts, (index,)))


def test_neighbours_of_a_rotary_pair_are_moved_apart_in_queries_and_keys_alone() -> None:
    order = [0, 2, 1, 3, 4, 5]
    parts, rows = separate(), QkvRows(interleaved=4)
    plain = tensors.fused_qkv(NAMES, SHAPE, repeats=2, features=(3,)).build(parts, (slice(None),))
    moved = tensors.fused_qkv(NAMES, SHAPE, repeats=2, features=(3,), qkv_rows=rows).build(
        parts, (slice(None),)
    )
    np.testing.assert_array_equal(moved[:, :-1], plain[:, :-1, order])
    np.testing.assert_array_equal(moved[:, -1], plain[:, -1])


def test_gate_and_up_of_one_tensor_are_split_as_devices_split_them() -> None:
    tensor = np.arange(24).reshape(8, 3)
    source = tensors.two_parts("gate_up", (2, 4, 3))
    whole = source.build([tensor], (slice(None), slice(None), slice(None)))
    np.testing.assert_array_equal(whole, tensor.reshape(2, 4, 3))
    part = source.build([tensor], (slice(0, 1), slice(1, 3), slice(None)))
    np.testing.assert_array_equal(part, whole[:1, 1:3])


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("apertus", {"qk_norm": False}, "qk_norm = False. Allowed: true, or absent"),
        ("apertus", {"mlp_bias": True}, "mlp_bias = True. Allowed: false, or absent"),
        ("arcee", {"hidden_size": 36}, "hidden_size = 36. Allowed: a multiple of num_attention_h"),
        ("arcee", {"hidden_act": "xielu"}, "hidden_act = 'xielu'. Allowed: gelu"),
        (
            "bloom",
            {"apply_residual_connection_post_layernorm": True},
            "connection_post_layernorm = True. Allowed: false or absent",
        ),
        ("bloom", {"slow_but_exact": True}, "slow_but_exact = True. Allowed: false or absent"),
        ("bloom", {"n_embed": 64}, "hidden_size = 32. Allowed: n_embed, which is 64"),
        (
            "codegen",
            {"n_head": 6, "num_attention_heads": 6},
            "n_head = 6. Allowed: a multiple of 4",
        ),
        ("codegen", {"rotary_dim": None}, "rotary_dim = null. Allowed: a positive whole number"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm = True. Allowed: false, or absent"),
        ("cohere", {"logit_scale": None}, "logit_scale = null"),
        ("cohere2", {"hidden_size": 36}, "hidden_size = 36. Allowed: a multiple of num_attention"),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, "pattern = 'LLLG'. Allowed: a positive"),
        ("exaone4", {"sliding_window": 0}, "sliding_window = 0. Allowed: a positive whole number"),
        (
            "exaone4",
            {"sliding_window": None, "layer_types": ["sliding_attention"] * 4},
            "layer_types = ",
        ),
        ("falcon", {"alibi": True}, "alibi = True. Allowed: false, or absent"),
        (
            "falcon",
            {"new_decoder_architecture": True, "num_kv_heads": 3},
            "num_kv_heads = 3. Allowed: a divisor of num_attention_heads = 8",
        ),
        (
            "falcon",
            {"multi_query": False, "num_kv_heads": 4},
            "num_kv_heads = 4. Allowed: num_attention_heads = 8, without multi_query",
        ),
        (
            "falcon",
            {"new_decoder_architecture": True, "parallel_attn": False},
            "parallel_attn = False. Allowed: true, with new_decoder_architecture",
        ),
        (
            "falcon",
            {"num_ln_in_parallel_attn": 2},
            "num_ln_in_parallel_attn = 2. Allowed: 1 or absent, without new_decoder_architecture",
        ),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gemma", {"hidden_activation": "silu"}, "hidden_activation = 'silu'"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping = 0"),
        ("gemma2", {"sliding_window": None}, "sliding_window = null"),
        ("gpt_bigcode", {"add_cross_attention": True}, "add_cross_attention = True. Allowed"),
        ("gpt_bigcode", {"n_embd": 64}, "hidden_size = 32. Allowed: n_embd, which is 64"),
        (
            "gpt_neo",
            {},
            "has num_layers = 4. Allowed: 24, the number of layers that attention_types",
        ),
        ("gpt_neo", {"attention_types": [["global", 4]]}, "attention_types = [['global', 4]]"),
        ("gpt_neo", {"attention_types": [[["global"], 10**9]]}, "attention_types = [[['global'], "),
        ("gpt_neo", {"attention_layers": ["sparse"] * 4}, "attention_layers = ['sparse', "),
        (
            "gpt_neo",
            {"attention_types": [[["global"], 4]], "attention_layers": ["local"] * 4},
            "Allowed: the layers of attention_types, ['global', 'global'",
        ),
        (
            "gpt_neox",
            {"rotary_pct": 0.25, "partial_rotary_factor": 0.5},
            "rotary_pct, which is 0.25",
        ),
        ("gptj", {"rotary_dim": 3}, "rotary_dim = 3. Allowed: an even number of at most 4"),
        ("gptj", {"rotary_dim": None}, "rotary_dim = null. Allowed: a positive whole number"),
        ("granite", {"logits_scaling": 0}, "logits_scaling = 0"),
        ("helium", {"num_key_value_heads": "absent"}, "num_key_value_heads by default = 20"),
        (
            "hunyuan_v1_dense",
            {"rope_scaling": {"type": "dynamic", "alpha": -1}},
            "rope_scaling.alpha = -1. Allowed: a positive number",
        ),
        (
            "hunyuan_v1_dense",
            {
                "rope_scaling": {"type": "dynamic", "alpha": 5},
                "rope_parameters": {"rope_type": "dynamic", "alpha": 6},
            },
            "Allowed: rope_parameters.alpha",
        ),
        ("olmo", {"clip_qkv": 0}, "clip_qkv = 0. Allowed: a positive number"),
        (
            "ministral",
            {"sliding_window": None, "layer_types": ["sliding_attention"] * 4},
            "layer_types = ",
        ),
        (
            "ministral",
            {"sliding_window": 0},
            "sliding_window = 0. Allowed: a positive whole number",
        ),
        (
            "ministral3",
            {"rope_scaling": {"rope_type": "default"}},
            "no rope_scaling.llama_4_scaling",
        ),
        (
            "ministral3",
            {"rope_parameters": GROWING | {"llama_4_scaling_beta": -1}},
            "rope_parameters.llama_4_scaling_beta = -1. Allowed: a number of at least 0",
        ),
        (
            "ministral3",
            {"rope_parameters": GROWING | {"original_max_position_embeddings": 0}},
            "rope_parameters.original_max_position_embeddings = 0. Allowed: a positive number",
        ),
        (
            "ministral3",
            {"rope_parameters": GROWING, "rope_scaling": GROWING | {"llama_4_scaling_beta": 1}},
            "rope_scaling.llama_4_scaling_beta = 1. Allowed: that of rope_parameters",
        ),
        ("ministral3", {"head_dim": None}, "head_dim = null. Allowed: a positive whole number"),
        ("olmo3", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters = "),
        ("opt", {"activation_function": "tanh"}, "activation_function = 'tanh'. Allowed: gelu"),
        ("opt", {"layer_norm_elementwise_affine": False}, "elementwise_affine = False. Allowed"),
        ("opt", {"word_embed_proj_dim": 0}, "word_embed_proj_dim = 0. Allowed: a positive"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm = True. Allowed: false, or absent"),
        (
            "phi3",
            {"rope_scaling": {"type": "llama3"}},
            "rope_scaling.rope_type = 'llama3'. Allowed: default, longrope",
        ),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers = [1, 0]. Allowed: a list of 4"),
        (
            "smollm3",
            {"layer_types": ["sliding_attention"] * 4},
            "full_attention alone without use_sliding_window",
        ),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm = True. Allowed: false, or absent"),
        ("starcoder2", {"layer_types": ["sliding_attention"] * 4}, "layer_types = "),
    ],
)
def test_a_field_that_a_family_does_not_serve_is_named(
    name: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        build(name, **fields)


@pytest.mark.parametrize(
    ("name", "fields", "windows"),
    [
        ("gemma2", {}, (4096, None)),
        ("exaone4", {"sliding_window": 7}, (7, None)),
        ("exaone4", {"sliding_window": None}, (None,)),
        ("ministral", {}, (4096,)),
        ("ministral", {"sliding_window": None}, (None,)),
        (
            "ministral",
            {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 7},
            (None, 7),
        ),
        ("olmo3", {"sliding_window": 7}, (7, None)),
        ("cohere2", {"sliding_window": 7, "sliding_window_pattern": 2}, (7, None)),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 7}, (None, 7)),
        ("gpt_neo", {"attention_types": [[["global", "local"], 2]]}, (None, 256)),
        ("gpt_neo", {"attention_layers": ["local"] * 4, "window_size": 7}, (7,)),
        ("phi3", {"sliding_window": 7}, (7,)),
        ("starcoder2", {}, (None,)),
    ],
)
def test_layers_have_the_windows_that_config_json_says(
    name: str, fields: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert tuple(group.window for group in build(name, **fields).info.groups) == windows


def test_the_first_phi3_files_have_another_name_of_longrope_and_no_original_context() -> None:
    """Heads of CONFIG have 4 features, and so 2 rotary pairs."""
    lists = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 9.0]}
    fields = {"max_position_embeddings": 8192, "rope_scaling": {"type": "su", **lists}}
    info = build("phi3", **fields).info
    assert (info.max_model_len, info.auto_max_model_len) == (8192, 4096)
    newer = {"original_max_position_embeddings": 4096}
    newer |= fields | {"rope_scaling": {"rope_type": "longrope", **lists}}
    assert build("phi3", **newer).info == info


def test_gemma_reads_gelu_as_its_approximation_by_tanh() -> None:
    tanh = build("gemma", hidden_act="gelu_pytorch_tanh")
    assert build("gemma", hidden_act="gelu").info == tanh.info == build("gemma").info
    assert build("gemma", hidden_act="relu").info != tanh.info


QKV = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR_LAYERS = {
    "apertus": (*QKV, "up_proj", "down_proj"),
    "arcee": (*QKV, "up_proj", "down_proj"),
    "bloom": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "codegen": ("qkv_proj", "out_proj", "fc_in", "fc_out"),
    "cohere": TARGETS,
    "glm4": (*QKV, "gate_up_proj", "down_proj"),
    "gpt_bigcode": ("c_attn", "c_proj", "c_fc", "c_proj"),
    "gpt_neo": ("q_proj", "k_proj", "v_proj", "out_proj", "c_fc", "c_proj"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "nemotron": (*QKV, "up_proj", "down_proj"),
    "gptj": ("q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out"),
    "opt": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "starcoder2": (*QKV, "c_fc", "c_proj"),
}


@pytest.mark.parametrize("name", LINEAR_LAYERS)
def test_every_linear_layer_may_have_adapters_by_its_name_in_the_checkpoint(name: str) -> None:
    types = [[["global"], CONFIG["num_hidden_layers"]]]
    model = build(name, rotary_pct=0.5, rotary_dim=4, attention_types=types)
    found = adapted_layers(model, 1, 4, None)
    modules = [part.module for layer in found.values() for part in layer.parts]
    assert len(modules) == CONFIG["num_hidden_layers"] * len(LINEAR_LAYERS[name])
    assert {module.rpartition(".")[2] for module in modules} == set(LINEAR_LAYERS[name])


def test_a_head_of_another_name_has_adapters_as_a_linear_layer() -> None:
    found = adapted_layers(build("gpt_neox", rotary_pct=0.5), 1, 4, ["embed_in", "embed_out"])
    assert {path: type(one) for path, one in found.items()} == {
        "embed": AdaptedEmbedding,
        "lm_head": AdaptedLayer,
    }


def test_the_table_of_positions_of_opt_has_two_rows_more_than_its_context() -> None:
    model = build("opt")
    assert model.info.max_model_len == CONFIG["max_position_embeddings"]
    assert model.weight_specs()["positions"].shape == (model.info.max_model_len + 2, 32)


def test_norms_of_opt_follow_what_was_added_or_come_before_it() -> None:
    names = {
        before: {
            path: source.names[0].removeprefix("model.decoder.")
            for path, source in build("opt", do_layer_norm_before=before).tensor_sources().items()
            if path.endswith("scale")
        }
        for before in (True, False)
    }
    assert names[True]["layers.0.attention_norm.scale"] == "layers.0.self_attn_layer_norm.weight"
    assert names[True]["norm.scale"] == "final_layer_norm.weight"
    assert "layers.0.attention_norm.norm.scale" not in names[False]
    assert names[False]["layers.0.mlp_norm.norm.scale"] == "layers.0.self_attn_layer_norm.weight"
    assert names[False]["layers.1.attention_norm.norm.scale"] == "layers.0.final_layer_norm.weight"
    assert names[False]["norm.scale"] == "layers.3.final_layer_norm.weight"


@pytest.mark.parametrize(
    ("fields", "heads"),
    [
        ({}, (1, 8)),
        ({"num_kv_heads": 8}, (1, 8)),
        ({"multi_query": False}, (8, 1)),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, (2, 4)),
        ({"new_decoder_architecture": True}, (8, 1)),
    ],
)
def test_falcon_has_the_kv_heads_of_its_architecture(
    fields: dict[str, Any], heads: tuple[int, int]
) -> None:
    spec = build("falcon", **fields).info.attention["full"]
    assert (spec.num_kv_heads, spec.group) == heads


@pytest.mark.parametrize(
    ("fields", "norms"),
    [
        ({}, ["input_layernorm"]),
        ({"parallel_attn": False}, ["input_layernorm", "post_attention_layernorm"]),
        ({"new_decoder_architecture": True}, ["ln_attn", "ln_mlp"]),
        (
            {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
            ["input_layernorm"],
        ),
    ],
)
def test_a_layer_of_falcon_has_the_norms_of_its_architecture(
    fields: dict[str, Any], norms: list[str]
) -> None:
    names = {one.names[0] for one in build("falcon", **fields).tensor_sources().values()}
    found = {name.split(".")[3] for name in names if name.startswith("transformer.h.0.")}
    assert sorted(found - {"self_attention", "mlp"}) == norms


@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_an_alpha_of_hunyuan_makes_a_larger_base_and_no_length(field: str) -> None:
    rule = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    fields = {"head_dim": 8, "rope_theta": 500.0, field: rule}
    larger = {"head_dim": 8, "rope_theta": 500.0 * 1000.0 ** (8 / 6)}
    assert build("hunyuan_v1_dense", **fields).info == build("hunyuan_v1_dense", **larger).info
    dynamic = build("hunyuan_v1_dense", **(fields | {field: rule | {"alpha": 0, "factor": 2.0}}))
    assert dynamic.info.max_model_len == 2 * CONFIG["max_position_embeddings"]


@pytest.mark.parametrize(
    ("fields", "biases"),
    [
        ({}, {"attention.qkv_bias"}),
        ({"attention_bias": False, "attention_out_bias": True}, {"attention.out_bias"}),
        (
            {"attention_bias": False, "mlp_bias": True},
            {"mlp.gate_bias", "mlp.up_bias", "mlp.down_bias"},
        ),
    ],
)
def test_biases_of_seed_oss_have_a_switch_each(fields: dict[str, Any], biases: set[str]) -> None:
    model = build("seed_oss", **fields)
    found = {path.removeprefix("layers.0.") for path in model.weight_specs() if "bias" in path}
    assert {path for path in found if not path.startswith("layers.")} == biases
    assert model.info.attention["full"].head_dim == 128
    assert build("seed_oss", head_dim=None).info.attention["full"].head_dim == 4


def test_rotary_pairs_of_helium_are_moved_apart() -> None:
    rows = np.arange(48)[:, None] * np.ones((1, 32), int)
    parts = [rows[:32], rows[32:40], rows[40:]]
    source = build("helium", head_dim=4).tensor_sources()["layers.0.attention.qkv"]
    weight = source.build(parts, (slice(1, 2), *(slice(None),) * 3))[0, :, :, 0]
    assert weight[0].tolist() == [16, 18, 17, 19]
    assert weight[-2:].tolist() == [[36, 38, 37, 39], [44, 45, 46, 47]]
    assert (
        build("helium", head_dim=4)
        .weight_specs()
        .keys()
        .isdisjoint({"layers.0.attention.qkv_bias", "layers.0.attention.out_bias"})
    )


def test_norms_of_olmo_have_no_tensors_and_one_epsilon() -> None:
    model = build("olmo")
    names = {name for one in model.tensor_sources().values() for name in one.names}
    assert not [name for name in names if "norm" in name]
    assert build("olmo", rms_norm_eps=0.5).info == model.info
    assert build("olmo", clip_qkv=8.0).info != model.info


def test_xielu_has_a_parabola_above_zero_and_an_exponential_below() -> None:
    source = build("apertus").tensor_sources()["layers.0.mlp.numbers"]
    stored = {"alpha_p": [0.3], "alpha_n": [-0.2], "beta": 0.4, "eps": -0.25}
    assert source.names == tuple(f"model.layers.0.mlp.act_fn.{name}" for name in stored)
    tensors_of = [np.array(one, np.float32) for one in stored.values()]
    numbers = jnp.asarray(source.build(tensors_of, (slice(None),)))
    x = np.array([-3.0, -0.1, 0.0, 0.5, 2.0])
    p, n = np.log1p(np.exp(0.3)), 0.4 + np.log1p(np.exp(-0.2))
    below = n * (np.exp(np.minimum(x, -0.25)) - 1 - x) + 0.4 * x
    wanted = np.where(x > 0, p * x * x + 0.4 * x, below)
    np.testing.assert_allclose(xielu(jnp.asarray(x, jnp.float32), numbers), wanted, rtol=1e-6)


def test_apertus_has_a_rotary_rule_of_its_own_only_where_config_json_has_none() -> None:
    given = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    given |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 12e6}
    silent = build("apertus")
    assert build("apertus", rope_parameters=given).info == silent.info
    assert build("apertus", rope_theta=500.0).info == silent.info
    plain = {"rope_type": "default", "rope_theta": 12e6}
    assert build("apertus", rope_parameters=plain).info != silent.info
    assert build("apertus", rope_parameters={}).info == build("apertus", rope_scaling=plain).info
    names = {name for one in silent.tensor_sources().values() for name in one.names}
    assert "model.layers.3.feedforward_layernorm.weight" in names


@pytest.mark.parametrize(
    ("fields", "unrotated"),
    [
        ({}, [3]),
        ({"sliding_window_pattern": 2}, [1, 3]),
        ({"layer_types": ["full_attention"] * 4}, [0, 1, 2, 3]),
        ({"sliding_window": None}, []),
    ],
)
def test_full_layers_of_exaone_have_no_rotary_positions_unless_no_layer_may_have_a_window(
    fields: dict[str, Any], unrotated: list[int]
) -> None:
    constants = build("exaone4", **fields).info.constants
    assert f"unrotated_layers={frozenset(unrotated)}," in constants


@pytest.mark.parametrize(("fields", "heads"), [({}, 1), ({"multi_query": False}, 8)])
def test_queries_of_gpt_bigcode_share_one_key_or_each_has_its_own(
    fields: dict[str, Any], heads: int
) -> None:
    """Rows of one tensor: all queries, the key, the value; or these three for each head."""
    model = build("gpt_bigcode", **fields)
    assert model.info.attention["full"].num_kv_heads == heads
    source = model.tensor_sources()["layers.0.attention.qkv_bias"]
    assert source.names == ("transformer.h.0.attn.c_attn.bias",)
    tensor = np.arange((8 + 2 * heads) * 4)
    assert source.shapes == (tensor.shape,)
    found = source.build([tensor], (slice(None),))
    np.testing.assert_array_equal(found, tensor.reshape(heads, -1, 4))


def test_queries_of_ministral3_grow_with_their_position() -> None:
    positions = np.array([0, 99, 100, 250, 10**6], np.int32)
    expected = [1, 1, 1 + 0.5 * np.log(2), 1 + 0.5 * np.log(3), 1 + 0.5 * np.log(10001)]
    np.testing.assert_allclose(QueryScale(0.5, 100.0).at(positions), expected, rtol=1e-6)
    outside = {key: one for key, one in GROWING.items() if not key.startswith("original")}
    for fields in (
        {"rope_parameters": GROWING},
        {"rope_scaling": outside, "original_max_position_embeddings": 100},
    ):
        constants = build("ministral3", **fields).info.constants
        assert "query_scale=QueryScale(beta=0.5, context=100.0)" in constants
    assert "QueryScale(beta=0.1, context=16384.0)" in build("ministral3").info.constants
