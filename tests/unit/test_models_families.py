"""Families read config.json: what they make of it, and what they refuse by name."""

from __future__ import annotations

from typing import Any

import pytest

from enginebay.errors import CheckpointError, ConfigError
from enginebay.model import count_weights
from enginebay.ops.spec import RopeSpec
from enginebay_models import plugin
from enginebay_models.hf_config import layer_windows, read_decoder, read_rope
from enginebay_models.llama import family as llama
from enginebay_models.mistral import family as mistral
from enginebay_models.qwen2 import family as qwen2
from enginebay_models.qwen3 import family as qwen3

CONFIG: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def test_weights_keep_whole_groups_together() -> None:
    specs = llama.build(CONFIG, dtype="float32").weight_specs()
    assert specs["layers.0.attention.qkv"].shape == (2, 6, 4, 32)
    assert specs["layers.0.attention.qkv"].axes == ("kv_heads", None, None, None)
    assert specs["layers.3.attention.out"].shape == (32, 2, 4, 4)
    assert specs["layers.0.mlp.gate"].shape == (48, 32)
    assert specs["lm_head"].axes == ("vocab", None)


def test_tied_model_has_no_head_of_its_own() -> None:
    tied = llama.build(CONFIG | {"tie_word_embeddings": True}, dtype="float32")
    untied = llama.build(CONFIG, dtype="float32")
    assert "lm_head" not in tied.weight_specs()
    assert count_weights(untied) - count_weights(tied) == 64 * 32


def test_kv_heads_are_repeated_until_every_shard_has_one() -> None:
    info = llama.build(CONFIG, dtype="bfloat16", num_shards=4).info
    spec, group = info.attention["full"], info.groups[0]
    assert (spec.num_q_heads, spec.num_kv_heads, spec.group, group.num_kv_heads) == (8, 4, 2, 4)
    assert (spec.q_dtype, spec.kv_dtype) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize("num_shards", [3, 16])
def test_shards_that_would_split_a_head_are_refused(num_shards: int) -> None:
    with pytest.raises(ConfigError, match=f"{num_shards} shards for 8 query heads and 2 KV heads"):
        llama.build(CONFIG, dtype="float32", num_shards=num_shards)


def test_cache_groups_follow_the_layers_windows() -> None:
    full = mistral.build(CONFIG | {"sliding_window": None}, dtype="float32").info
    window = mistral.build(CONFIG | {"sliding_window": 16}, dtype="float32").info
    silent = mistral.build(CONFIG, dtype="float32").info
    fields = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}
    mixed = qwen2.build(CONFIG | fields, dtype="float32").info
    groups = [
        [(g.name, g.num_layers, g.window) for g in info.groups] for info in (full, window, silent, mixed)
    ]
    assert groups[0] == [("full", 4, None)]
    assert groups[1] == [("window", 4, 16)]
    assert groups[2] == [("window", 4, 4096)]
    assert groups[3] == [("full", 3, None), ("window", 1, 16)]


def test_layer_types_decide_over_max_window_layers() -> None:
    kinds = ["sliding_attention", "full_attention"]
    fields = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2, "layer_types": kinds}
    assert layer_windows(fields, 2) == (8, None)
    assert layer_windows(fields | {"use_sliding_window": False}, 2) == (None, None)
    with pytest.raises(CheckpointError, match="layer_types"):
        layer_windows(fields, 3)


def test_families_have_the_biases_and_norms_of_theirs() -> None:
    def layer_weights(family: Any, **fields: Any) -> set[str]:
        names = family.build(CONFIG | fields, dtype="float32").weight_specs()
        return {n.removeprefix("layers.0.") for n in names if n.startswith("layers.0.")}

    plain = layer_weights(llama)
    assert layer_weights(llama, attention_bias=True) - plain == {"attention.qkv_bias", "attention.out_bias"}
    assert layer_weights(llama, mlp_bias=True) - plain == {"mlp.gate_bias", "mlp.up_bias", "mlp.down_bias"}
    assert layer_weights(qwen2) - plain == {"attention.qkv_bias"}
    assert layer_weights(qwen3) - plain == {"attention.q_norm.scale", "attention.k_norm.scale"}
    assert qwen3.build(CONFIG, dtype="float32").info.groups[0].head_dim == 128


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, RopeSpec(10000.0, 8)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeSpec(5e5, 8)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, RopeSpec(1e6, 8)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeSpec(10000.0, 8, "linear", 2.0)),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4}, "max_position_embeddings": 64},
            RopeSpec(10000.0, 8, "yarn", 4, 64),
        ),
    ],
)
def test_rope_is_read_in_both_spellings(config: dict[str, Any], wanted: RopeSpec) -> None:
    assert read_rope(config, 8) == wanted


def test_yarn_stretches_the_context() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert read_decoder(CONFIG | {"rope_scaling": scaling}).max_model_len == 512


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "no hidden_size"),
        ({"vocab_size": "many"}, "vocab_size = 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3.*divisor of num_attention_heads = 8"),
        ({"head_dim": 7}, "head_dim = 7"),
        ({"rms_norm_eps": -1}, "rms_norm_eps = -1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'.*silu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2}},
            "rope_scaling.rope_type = 'dynamic'.*llama3, yarn",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type = 'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "no rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor = '2'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor = 0"),
        ({"rope_scaling": {"type": "linear", "factor": -2.0}}, "rope_scaling.factor = -2.0"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "rope_scaling.factor = True"),
        ({"rope_scaling": {"type": "yarn", "factor": float("nan")}}, "rope_scaling.factor = nan"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "truncate": 1}}, "rope_scaling.truncate = 1"),
        (
            {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64, "high_freq_factor": 1.0}},
            "rope_scaling.high_freq_factor = 1.0.*more than low_freq_factor",
        ),
        ({"rope_theta": float("inf")}, "rope_theta = inf"),
        ({"rope_scaling": LLAMA3}, "no rope_scaling.original_max_position_embeddings"),
        ({"rope_scaling": [1]}, r"rope_scaling = \[1\]"),
        ({"attention_bias": 1}, "attention_bias = 1"),
    ],
)
def test_a_field_that_cannot_be_served_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        llama.build(CONFIG | fields, dtype="float32")
    assert "Allowed: " in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_window_layers": None}, "no max_window_layers"),
        ({"max_window_layers": "3"}, "max_window_layers = '3'"),
        ({"layer_types": 4}, "layer_types = 4"),
        ({"layer_types": "full"}, "layer_types = 'full'"),
    ],
)
def test_a_malformed_window_is_named(fields: dict[str, Any], message: str) -> None:
    windowed = CONFIG | {"use_sliding_window": True, "sliding_window": 16}
    with pytest.raises(CheckpointError, match=message):
        qwen2.build(windowed | fields, dtype="float32")


def test_plugin_declares_the_architectures_of_the_families() -> None:
    declared: dict[str, Any] = {}

    def register(name: str, target: str, *, summary: str, capabilities: Any = None) -> None:
        declared[name] = capabilities["architectures"]

    plugin.register_models(register)  # type: ignore[arg-type]
    assert declared == {family.name: family.architectures for family in (llama, mistral, qwen2, qwen3)}
