"""Families read config.json: what they make of it, and what they refuse by name."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from enginebay.compose.composition import make_plan
from enginebay.config import EngineConfig
from enginebay.errors import CheckpointError, ConfigError
from enginebay.ops.linear import LINEAR
from enginebay.ops.rotary import RopeSpec, rope_frequencies
from enginebay_models import gpt2, plugin
from enginebay_models.blocks import Mlp
from enginebay_models.hf_config import layer_windows, read_decoder
from enginebay_models.llama import LlamaFamily
from enginebay_models.llama import family as llama
from enginebay_models.mistral import family as mistral
from enginebay_models.qwen2 import family as qwen2
from enginebay_models.qwen3 import family as qwen3
from enginebay_models.rope_config import read_rope
from enginebay_shared.opening import count_weights

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


@pytest.mark.parametrize(
    "change", [{"rope_theta": 5e5}, {"rms_norm_eps": 1e-5}, {"hidden_act": "relu"}]
)
def test_numbers_that_steps_are_compiled_with_are_among_a_models_facts(
    change: dict[str, Any],
) -> None:
    """Compiled functions are stored with a fingerprint of the facts."""
    facts = [
        repr(llama.build(CONFIG | fields, dtype="float32").info) for fields in ({}, {}, change)
    ]
    assert facts[0] == facts[1] != facts[2]


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
        [(g.name, g.num_layers, g.window) for g in info.groups]
        for info in (full, window, silent, mixed)
    ]
    assert groups[0] == [("full", 4, None)]
    assert groups[1] == [("window", 4, 16)]
    assert groups[2] == [("window", 4, 4096)]
    assert groups[3] == [("full", 3, None), ("window", 1, 16)]


def test_layer_types_decide_over_max_window_layers() -> None:
    kinds = ["sliding_attention", "full_attention"]
    fields = {
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 2,
        "layer_types": kinds,
    }
    assert layer_windows(fields, 2) == (8, None)
    with pytest.raises(
        CheckpointError, match=r"layer_types = .*full_attention alone where use_sliding_window"
    ):
        layer_windows(fields | {"use_sliding_window": False}, 2)
    with pytest.raises(CheckpointError, match="layer_types"):
        layer_windows(fields, 3)


def test_qwen_takes_what_transformers_takes_where_config_json_is_silent() -> None:
    silent = {name: value for name, value in CONFIG.items() if name != "num_key_value_heads"}
    for family in (qwen2, qwen3):
        fields: dict[str, Any] = {
            "num_attention_heads": 64,
            "head_dim": 8,
            "use_sliding_window": True,
            "max_window_layers": 3,
        }
        info = family.build(silent | fields, dtype="float32").info
        assert [(g.name, g.num_kv_heads, g.window) for g in info.groups] == [
            ("full", 32, None),
            ("window", 32, 4096),
        ]
        del fields["use_sliding_window"]
        info = family.build(silent | fields | {"sliding_window": 16}, dtype="float32").info
        assert [(g.name, g.window) for g in info.groups] == [("full", None)]
        with pytest.raises(
            CheckpointError, match=r"num_key_value_heads by default = 32.*divisor of .* = 8"
        ):
            family.build(silent, dtype="float32")
    assert llama.build(silent, dtype="float32").info.groups[0].num_kv_heads == 8


def test_only_its_own_kinds_of_layers_are_served_by_a_family_without_any() -> None:
    kinds = ["full_attention"] * 3 + ["sliding_attention"]
    for family in (llama, mistral):
        with pytest.raises(CheckpointError, match="layer_types"):
            family.build(CONFIG | {"layer_types": kinds}, dtype="float32")


def test_families_have_the_biases_and_norms_of_theirs() -> None:
    def layer_weights(family: Any, **fields: Any) -> set[str]:
        names = family.build(CONFIG | fields, dtype="float32").weight_specs()
        return {n.removeprefix("layers.0.") for n in names if n.startswith("layers.0.")}

    plain = layer_weights(llama)
    assert layer_weights(llama, attention_bias=True) - plain == {
        "attention.qkv_bias",
        "attention.out_bias",
    }
    assert layer_weights(llama, mlp_bias=True) - plain == {
        "mlp.gate_bias",
        "mlp.up_bias",
        "mlp.down_bias",
    }
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
    assert read_rope({"max_position_embeddings": 128} | config).spec(8) == wanted


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
ORIGINAL = "original_max_position_embeddings"


def test_yarn_stretches_the_context() -> None:
    assert read_decoder(CONFIG | {"rope_scaling": YARN | {ORIGINAL: 128}}).max_model_len == 512
    longer = {"max_position_embeddings": 200, "rope_scaling": YARN | {ORIGINAL: 128}}
    assert read_decoder(CONFIG | longer).max_model_len == 512, "the original context is stretched"


@pytest.mark.parametrize("rules", [LLAMA3, YARN])
def test_the_original_context_beside_the_rule_wins(rules: dict[str, Any]) -> None:
    def original(**fields: Any) -> float:
        return read_rope(CONFIG | fields).spec(8).original_max_position_embeddings

    assert original(rope_scaling=rules | {ORIGINAL: 32}) == 32
    assert original(rope_scaling=rules | {ORIGINAL: 32}, **{ORIGINAL: 64}) == 64
    assert original(rope_scaling=rules, **{ORIGINAL: 64}) == 64
    assert original(rope_scaling=rules) == 128


def test_both_spellings_of_one_rule_are_read_and_two_rules_are_refused() -> None:
    both = {"rope_parameters": YARN, "rope_scaling": {"type": "yarn", "factor": 4}}
    assert read_rope(CONFIG | both).spec(8) == RopeSpec(10000.0, 8, "yarn", 4.0, 128)
    for change, message in (
        ({"type": "linear", "factor": 4.0}, "different rope_type .'yarn', 'linear'."),
        (YARN | {"factor": 8.0}, "different factor .4.0, 8.0."),
        (YARN | {"rope_theta": 1e6}, "different rope_theta .10000.0, 1000000.0."),
        (YARN | {"beta_fast": 16.0}, "different beta_fast .None, 16.0."),
    ):
        with pytest.raises(
            CheckpointError, match=f"rope_parameters and rope_scaling with {message}"
        ):
            read_rope(CONFIG | {"rope_parameters": YARN, "rope_scaling": change})


def test_rules_that_depend_on_the_length_are_settled_by_max_model_len() -> None:
    dynamic = read_rope(CONFIG | {"rope_scaling": {"type": "dynamic", "factor": 4.0}})
    assert (dynamic.max_model_len, dynamic.auto_max_model_len) == (512, 128)
    assert dynamic.spec(8) == dynamic.spec(8, 100) == RopeSpec(10000.0, 8)
    assert dynamic.spec(8, 512).theta == pytest.approx(10000.0 * 13 ** (8 / 6))
    lists = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 9.0]}
    longrope = read_rope(CONFIG | {"rope_scaling": {"type": "longrope", **lists}, ORIGINAL: 32})
    assert (longrope.max_model_len, longrope.auto_max_model_len) == (128, 32)
    assert (
        longrope.spec(4).frequency_divisors == longrope.spec(4, 32).frequency_divisors == (1.0, 1.5)
    )
    assert longrope.spec(4, 33).frequency_divisors == (2.0, 9.0)


@pytest.mark.parametrize(("asked", "settled"), [(None, 128), (300, 300)])
def test_the_length_of_an_engine_reaches_its_rotary_positions(
    asked: int | None, settled: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, seen = LlamaFamily.build, []

    def recorded(self: LlamaFamily, *args: Any, **sizes: Any) -> Any:
        seen.append(sizes)
        return build(self, *args, **sizes)

    monkeypatch.setattr(LlamaFamily, "build", recorded)
    config = CONFIG | {
        "architectures": ["LlamaForCausalLM"],
        "rope_scaling": {"type": "dynamic", "factor": 4.0},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = make_plan(EngineConfig(model=str(tmp_path), max_model_len=asked))
    assert plan.config.max_model_len == settled
    assert [sizes["max_model_len"] for sizes in seen] == [asked]
    why = next(reason.why for reason in plan.reasons if reason.setting == "max_model_len")
    assert ("up to 512, changes the model's rotary frequencies" in why) == (asked is None)


def test_partial_rotary_factor_narrows_scaled_rules_alone() -> None:
    half = CONFIG | {"partial_rotary_factor": 0.5}
    assert read_rope(half).spec(8) == RopeSpec(10000.0, 8)
    assert (
        read_rope(half | {"rope_scaling": {"type": "linear", "factor": 2}}).spec(8).rotary_dim == 4
    )
    proportional = read_rope(half | {"rope_scaling": {"type": "proportional"}}).spec(8)
    assert proportional == RopeSpec(10000.0, 8, "proportional", proportion=0.5)
    np.testing.assert_allclose(rope_frequencies(proportional)[0], [1.0, 0.1, 0.0, 0.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "hidden_size = null"),
        ({"vocab_size": "many"}, "vocab_size = 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3.*divisor of num_attention_heads = 8"),
        ({"head_dim": 7}, "head_dim = 7"),
        ({"head_dim": 10**9}, "head_dim = 1000000000"),
        ({"hidden_size": 2 * 10**9}, "head_dim = 250000000"),
        ({"rms_norm_eps": -1}, "rms_norm_eps = -1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'"),
        ({"hidden_act": "quick_gelu"}, "hidden_act = 'quick_gelu'.*relu, relu2, silu"),
        ({"hidden_act": ["silu"]}, r"hidden_act = \['silu'\]"),
        (
            {"hidden_size": 36, "head_dim": 4},
            "hidden_size = 36.*multiple of num_attention_heads = 8",
        ),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5"),
        (
            {"partial_rotary_factor": 0.25, "rope_scaling": {"type": "dynamic", "factor": 2}},
            "partial_rotary_factor = 0.25.*head_dim = 4",
        ),
        (
            {"rope_scaling": {"type": "su", "factor": 2}},
            "rope_scaling.rope_type = 'su'.*linear, llama3",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "no rope_parameters.short_factor"),
        (
            {
                "rope_scaling": {
                    "type": "longrope",
                    "short_factor": [1, 1, 1],
                    "long_factor": [1, 1],
                }
            },
            "short_factor = 'a list of 3'.*2 numbers",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1, 0], "long_factor": [1, 1]}},
            r"rope_scaling.short_factor = \[1, 0\]",
        ),
        (
            {"rope_scaling": {"full_attention": {}}},
            "rope_scaling.full_attention = {}.*one rule for all",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2}, "rope_theta": 1}, "no finite frequencies"),
        (
            {"rope_scaling": LLAMA3, "original_max_position_embeddings": None},
            "original_max_position_embeddings = null",
        ),
        ({"rope_theta": None}, "rope_theta = null"),
        ({"rope_theta": 10**400}, "rope_theta = 1000"),
        ({"attention_bias": None}, "attention_bias = null"),
        ({"rope_scaling": {"type": "linear"}}, "no rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor = '2'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor = 0"),
        ({"rope_scaling": {"type": "linear", "factor": -2.0}}, "rope_scaling.factor = -2.0"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "rope_scaling.factor = True"),
        ({"rope_scaling": {"type": "yarn", "factor": float("nan")}}, "rope_scaling.factor = nan"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "truncate": 1}},
            "rope_scaling.truncate = 1",
        ),
        (
            {
                "rope_scaling": LLAMA3
                | {"original_max_position_embeddings": 64, "high_freq_factor": 1.0}
            },
            "rope_scaling.high_freq_factor = 1.0.*more than low_freq_factor",
        ),
        ({"rope_theta": float("inf")}, "rope_theta = inf"),
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
        ({"max_window_layers": None}, "max_window_layers = null"),
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
    families = [importlib.import_module(f"enginebay_models.{name}").family for name in declared]
    assert declared == {family.name: family.architectures for family in families}
    files = Path(plugin.__file__).parent.glob("*.py")
    assert declared.keys() == {one.stem for one in files if "ModelFamily)" in one.read_text()}


class Products:
    """Its ops multiply by a weight."""

    def __getitem__(self, op: Any) -> Any:
        assert op is LINEAR
        return lambda x, weight, _: x @ weight.T


def test_the_mlp_opens_its_gate_by_the_activation_of_config_json(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Mlp] = []
    make = Mlp.__init__

    def record(self: Mlp, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(Mlp, "__init__", record)
    llama.build(CONFIG | {"hidden_act": "relu", "intermediate_size": 32}, dtype="float32")
    x: Any = np.linspace(-2, 2, 64, dtype=np.float32).reshape(2, 32)
    ops: Any = Products()
    weights = nnx.Param(np.eye(32, dtype=np.float32))
    made[0].gate = made[0].up = made[0].down = weights
    np.testing.assert_allclose(made[0](x, ops), np.maximum(x, 0) * x)
    assert [mlp.activation for mlp in made] == ["relu"] * 4


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("activation_function", None, "activation_function = null"),
        ("scale_attn_by_inverse_layer_idx", None, "scale_attn_by_inverse_layer_idx = null"),
        ("hidden_size", 32, "hidden_size = 32. Allowed: n_embd, which is 16"),
        ("num_hidden_layers", 5, "num_hidden_layers = 5. Allowed: n_layer, which is 1"),
    ],
)
def test_gpt2_names_what_is_wrong_in_its_configuration(
    field: str, value: object, reason: str
) -> None:
    config = {"n_embd": 16, "n_head": 2, "n_layer": 1, field: value}
    with pytest.raises(CheckpointError, match=reason):
        gpt2.family.build(config, dtype="float32")
