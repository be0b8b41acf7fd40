"""Every field of transformers' configurations of a family: it changes the model, is refused by
name, or changes nothing in transformers either.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
from typing import Any

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError

from enginebay.errors import CheckpointError
from tests.parity import tiny

NEUTRAL = """
    attention_dropout attention_softmax_in_fp32 attn_pdrop bos_token_id chunk_size
    classifier_dropout dropout embd_pdrop embed_dropout eod_token_id eos_token_id expand
    hidden_dropout init_std initializer_range input_jitter_noise layerdrop mamba_chunk_size
    mamba_ssm_cache_dtype moe_shared_expert_overlap mtp_layers_block_type n_ctx
    num_logits_to_keep num_mtp_layers num_nextn_predict_layers output_router_logits pad_token_id
    pretraining_tp rescale_prenorm_residual resid_dropout resid_pdrop residual_dropout
    residual_in_fp32 router_aux_loss_coef scale_attention_softmax_in_fp32 time_step_floor
    time_step_max use_cache use_mamba_kernels
"""
"""Fields of training, of what transformers returns, of what it does not read, and of generation,
which the core reads.
"""

ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("ApertusConfig", ROPE),
    "arcee": ("ArceeConfig", {"hidden_act": "gelu"} | ROPE),
    "bloom": ("BloomConfig", {}),
    "codegen": ("CodeGenConfig", {"n_inner": 40}),
    "deepseek_v3": ("DeepseekV3Config", ROPE),
    "dots1": ("Dots1Config", {"layer_types": ["sliding_attention"] * 2} | ROPE),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", {"moe_layer_end_index": 0} | ROPE),
    "exaone4": ("Exaone4Config", {"layer_types": ["full_attention", "sliding_attention"]} | ROPE),
    "falcon": ("FalconConfig", {"ffn_hidden_size": 40, "num_ln_in_parallel_attn": 1} | ROPE),
    "glm4_moe": ("Glm4MoeConfig", ROPE),
    "falcon_h1": (
        "FalconH1Config",
        {"time_step_limit": [0.1, 0.2], "mlp_multipliers": [0.5, 0.25], "mamba_d_head": 12}
        | {"ssm_multipliers": [0.5] * 5}
        | ROPE,
    ),
    "gpt_bigcode": ("GPTBigCodeConfig", {"n_inner": 40}),
    "gpt_neo": ("GPTNeoConfig", {"attention_types": [[["local"], 2]], "intermediate_size": 40}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", ROPE),
    "gpt_oss": (
        "GptOssConfig",
        {"layer_types": ["full_attention", "sliding_attention"], "max_position_embeddings": 262144}
        | ROPE,
    ),
    "gptj": ("GPTJConfig", {"n_inner": 40}),
    "granitemoe": ("GraniteMoeConfig", ROPE),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {"layer_types": ["attention", "mamba", "attention"], "time_step_limit": [0.1, 0.2]}
        | {"position_embedding_type": "rope", "mamba_d_head": 12}
        | ROPE,
    ),
    "granitemoeshared": ("GraniteMoeSharedConfig", ROPE),
    "helium": ("HeliumConfig", ROPE),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", ROPE),
    "internlm3": ("InternLM3Config", ROPE),
    "nemotron_h": (
        "NemotronHConfig",
        {"mlp_hidden_act": "silu", "time_step_limit": [0.1, 0.2]},
    ),
    "olmo": ("OlmoConfig", ROPE),
    "lfm2_moe": ("Lfm2MoeConfig", {"layer_types": ["full_attention", "conv"]} | ROPE),
    "ministral": ("MinistralConfig", {"layer_types": ["sliding_attention"] * 2} | ROPE),
    "minimax_m2": ("MiniMaxM2Config", ROPE),
    "ministral3": (
        "Ministral3Config",
        {
            "rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.3}
            | {"original_max_position_embeddings": 64}
        },
    ),
    "opt": ("OPTConfig", {"word_embed_proj_dim": 24}),
    "phi": ("PhiConfig", ROPE),
    "seed_oss": ("SeedOssConfig", ROPE),
    "phimoe": ("PhimoeConfig", ROPE),
}
"""Of each family, transformers' configuration, and another value of fields whose type has none."""

NEEDED: dict[tuple[str, str], dict[str, Any]] = {
    ("ernie4_5_moe", "moe_layer_interval"): {"moe_layer_start_index": 0},
    ("falcon_h1", "mamba_expand"): {"mamba_d_ssm": None, "mamba_d_head": "auto"},
    ("falcon", "multi_query"): {"new_decoder_architecture": False, "num_kv_heads": None},
    ("lfm2_moe", "num_hidden_layers"): {"layer_types": None, "full_attn_idxs": [1]},
    ("ministral", "num_hidden_layers"): {"layer_types": None},
    ("opt", "_remove_final_layer_norm"): {"do_layer_norm_before": True},
}
"""Other fields without which a field is not read."""

UNREAD = {
    ("deepseek_v3", "num_key_value_heads"),
    ("glm4_moe_lite", "num_key_value_heads"),
    ("minimax_m2", "router_jitter_noise"),
    *(("nemotron_h", name) for name in ("mamba_proj_bias", "n_shared_experts", "sliding_window")),
    ("nemotron_h", "time_step_min"),
}
"""Fields that may have only one value in transformers, that it does not read in this family, or
that are of training, and that are not read here; and `time_step_min`, which transformers reads for
prompts alone.
"""

SHARED = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}


def fields_of(family: str) -> dict[str, Any]:
    """The fields of transformers' configuration of a family, with their defaults."""
    own = getattr(transformers, FAMILIES[family][0])
    return {one.name: one.default for one in dataclasses.fields(own) if one.name not in SHARED}


def config_of(family: str, name: str) -> dict[str, Any]:
    """A small configuration, in fields of transformers' alone."""
    known = {*fields_of(family), "architectures", "model_type"}
    small = {key: one for key, one in tiny.CONFIGS[f"{family}-one"].items() if key in known}
    return small | NEEDED.get((family, name), {})


IN_SHORT = ("deepseek_v3", "falcon", "glm4_moe", "gpt_oss", "granitemoehybrid", "lfm2_moe", "opt")
"""Families whose fields are not in long tests: they have most kinds of fields."""
CASES = [
    pytest.param(family, name, marks=() if family in IN_SHORT else pytest.mark.long)
    for family, (config, _) in FAMILIES.items()
    if hasattr(transformers, config)  # the oldest version lacks some
    for name in fields_of(family)
]


def outcome(family: str, config: dict[str, Any]) -> Any:
    """What is computed, of which tensors; or why not."""
    return built(family, json.dumps(config))


@functools.cache
def built(family: str, text: str) -> Any:
    """The outcome for the text of a config.json; most fields begin with the same one."""
    try:
        model = importlib.import_module(f"enginebay_models.{family}").family.build(
            json.loads(text), dtype="float32"
        )
    except CheckpointError as error:
        return str(error)
    sources = {path: (one.names, one.shapes) for path, one in model.tensor_sources().items()}
    return model.info, sources, model.weight_specs()


def another(value: Any) -> Any:
    """Another value of the same type; an id for None."""
    if value is None:
        return 3
    if isinstance(value, bool):
        return not value
    return "relu2" if isinstance(value, str) else 2 * value


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_field_is_honoured_neutral_or_refused_by_name(family: str, name: str) -> None:
    config = config_of(family, name)
    value = config.get(name)
    value = fields_of(family)[name] if value is None else value
    others = FAMILIES[family][1]
    changed = outcome(family, config | {name: others[name] if name in others else another(value)})
    if name in NEUTRAL.split() or (family, name) in UNREAD:
        assert changed == outcome(family, config)
    elif isinstance(changed, str):
        assert f"has {name} = " in changed
    else:
        assert changed != outcome(family, config)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_an_absent_field_has_the_default_of_transformers(family: str, name: str) -> None:
    config = {key: one for key, one in config_of(family, name).items() if key != name}
    absent = outcome(family, config)
    if isinstance(absent, str):
        absent = absent.replace(f"{name} by default", name)
    if not isinstance(absent, str) or f"has no {name}" not in absent:
        assert absent == outcome(family, config | {name: fields_of(family)[name]})


VARIANTS = {name.partition("-")[0]: name for name in reversed(tiny.CONFIGS)}
"""Of each family, the first small configuration."""

OWN_WIDTHS = {
    "gemma", "gemma2", "gemma3", "glm4", "gpt_oss", "helium", "minimax_m2", "ministral3",
    "nemotron_h", "qwen3",
}  # fmt: skip
"""Families with a width of heads of their own, in which null is no head_dim."""

OTHER_WIDTHS = {"ernie4_5", "internlm3", "seed_oss"}
"""Families in which an absent head_dim is a width of their own, and null is not."""


def without(family: str, name: str) -> dict[str, Any]:
    """The small configuration of a family, without a field."""
    return {key: one for key, one in tiny.CONFIGS[VARIANTS[family]].items() if key != name}


@pytest.mark.parametrize("family", VARIANTS)
def test_null_heads_are_hidden_size_by_heads_or_refused_by_name(family: str) -> None:
    config = without(family, "head_dim")
    found = outcome(family, config | {"head_dim": None})
    # Of qwen2, transformers takes null but for some rules of rotary positions, with which it fails.
    if family in {*OWN_WIDTHS, "qwen2"}:
        assert found.startswith("config.json has head_dim = null. Allowed: a positive whole number")
    elif family in OTHER_WIDTHS:
        width = config["hidden_size"] // config["num_attention_heads"]
        assert found == outcome(family, config | {"head_dim": width}) != outcome(family, config)
    else:
        assert not isinstance(found, str), found
        assert found == outcome(family, config)


@pytest.mark.parametrize("family", VARIANTS)
def test_a_null_tie_is_refused_by_name_and_transformers_refuses_the_same(family: str) -> None:
    config = without(family, "tie_word_embeddings")
    assert not isinstance(outcome(family, config), str)
    found = outcome(family, config | {"tie_word_embeddings": None})
    assert found.startswith("config.json has tie_word_embeddings = null. Allowed: true or false.")
    kind = config.pop("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip("this version of transformers lacks the family")
    type_of = transformers.AutoConfig.for_model
    for name in {"tie_word_embeddings", *(("head_dim",) if family in OWN_WIDTHS else ())}:
        with pytest.raises(StrictDataclassFieldValidationError, match=f"'{name}' expected"):
            type_of(kind, **config | {name: None})
