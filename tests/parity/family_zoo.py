"""Random small configurations of families, drawn from the values that their fields may have."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any

VOCAB_SIZE = 64
CONTEXT = 96

Draw = Callable[[random.Random], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Zoo:
    """The configurations of one family: an architecture of each `model_type`, and the values of its
    fields. `more` draws fields that belong together.
    """

    architectures: Mapping[str, str]
    fields: Mapping[str, tuple[Any, ...]]
    more: Draw = lambda _: {}


_BOOL = (False, True)
_THETA = (500.0, 10000.0, 500000.0)
_EPS = (1e-6, 1e-5, 1e-3)
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2")
_COMMON: dict[str, tuple[Any, ...]] = {
    "hidden_size": (32, 48, 64),
    "intermediate_size": (40, 64, 96),
    "num_hidden_layers": (1, 2, 4),
    "num_attention_heads": (4, 8),
    "num_key_value_heads": (1, 2, 4),
    "max_position_embeddings": (CONTEXT,),
    "tie_word_embeddings": _BOOL,
    "hidden_act": _ACTIVATIONS,
}
_RMS = _COMMON | {"rms_norm_eps": _EPS}
_ROUTED: dict[str, tuple[Any, ...]] = {
    "n_routed_experts": (8, 16),
    "n_shared_experts": (1, 2),
    "moe_intermediate_size": (24, 40),
    "first_k_dense_replace": (0, 1),
    "norm_topk_prob": _BOOL,
    "routed_scaling_factor": (1.0, 2.5),
}
_GRANITE_MOE: dict[str, tuple[Any, ...]] = _RMS | {
    "attention_bias": _BOOL,
    "embedding_multiplier": (1.0, 12.0),
    "attention_multiplier": (0.1, 0.5),
    "residual_multiplier": (0.22, 1.0),
    "logits_scaling": (1.0, 8.0),
    "num_local_experts": (4, 8),
    "num_experts_per_tok": (1, 2, 4),
}
_GPTJ: dict[str, tuple[Any, ...]] = {
    "n_embd": (64,),
    "n_head": (4, 8),
    "n_layer": (1, 2, 4),
    "n_inner": (None, 96),
    "n_positions": (CONTEXT,),
    "rotary_dim": (2, 4, 8),
    "activation_function": _ACTIVATIONS,
    "layer_norm_epsilon": _EPS,
    "tie_word_embeddings": _BOOL,
}
_LATENT: dict[str, tuple[Any, ...]] = {
    "kv_lora_rank": (16, 24),
    "q_lora_rank": (None, 20),
    "qk_rope_head_dim": (4, 8),
    "qk_nope_head_dim": (8, 12),
    "v_head_dim": (8, 20),
    "rope_interleave": _BOOL,
    "attention_bias": _BOOL,
}
_LAYER_NORM = _COMMON | {"layer_norm_eps": _EPS}


def _rope(*, partial: tuple[float, ...] = ()) -> Draw:
    """Rotary fields, older and newer, with a rule that scales or none."""

    def draw(rng: random.Random) -> dict[str, Any]:
        rules: dict[str, Any] = rng.choice(
            [
                {"rope_type": "default"},
                {"rope_type": "default"},
                {"rope_type": "linear", "factor": 2.0},
                {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": CONTEXT // 4,
                },
                {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
            ]
        )
        found: dict[str, Any] = {}
        if rng.random() < 0.7:
            found["rope_theta"] = rng.choice(_THETA)
        if partial and rng.random() < 0.7:
            found["partial_rotary_factor"] = rng.choice(partial)
        if rng.random() < 0.5:
            return {"rope_parameters": rules | found}
        return found | ({} if rules["rope_type"] == "default" else {"rope_scaling": rules})

    return draw


def _kinds(rng: random.Random) -> dict[str, Any]:
    """Nothing, or a kind of attention for each layer; `Zoo.fields` has their number."""
    kinds = ("full_attention", "sliding_attention")
    return {} if rng.random() < 0.5 else {"layer_types": [rng.choice(kinds) for _ in range(8)]}


def _both(*draws: Draw) -> Draw:
    def draw(rng: random.Random) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for one in draws:
            found |= one(rng)
        return found

    return draw


def _olmo3_rope(rng: random.Random) -> dict[str, Any]:
    theta = {"rope_theta": rng.choice(_THETA)}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
    nested = {"full_attention": yarn | theta, "sliding_attention": {"rope_type": "default"} | theta}
    return rng.choice([{}, theta, theta | {"rope_scaling": yarn}, {"rope_parameters": nested}])


def _phi3_rope(rng: random.Random) -> dict[str, Any]:
    """One size of heads, 16, as the lists of longrope have a number per pair of features."""
    partial = rng.choice((0.5, 0.75, 1.0))
    pairs = int(16 * partial) // 2
    rule = {
        "rope_type": "longrope",
        "short_factor": [1 + rng.random() for _ in range(pairs)],
        "long_factor": [2 + rng.random() for _ in range(pairs)],
    }
    found: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4}
    found |= {"partial_rotary_factor": partial, "original_max_position_embeddings": CONTEXT // 2}
    return found | rng.choice([{}, {"rope_scaling": rule}, {"rope_theta": rng.choice(_THETA)}])


def _phimoe_rope(rng: random.Random) -> dict[str, Any]:
    """Lists of longrope for heads of 16 features."""
    rule: dict[str, Any] = {
        name: [start + rng.random() for _ in range(8)]
        for name, start in (("short_factor", 1), ("long_factor", 2))
    }
    rule |= {"short_mscale": rng.choice((1.0, 1.25)), "long_mscale": 1.5}
    rule |= {"rope_type": "longrope", "original_max_position_embeddings": CONTEXT // 2}
    theta = {"rope_theta": rng.choice(_THETA)}
    newer = {"rope_parameters": rule | theta}
    return rng.choice([{}, theta, newer, theta | {"rope_scaling": rule}])


def _no_rope(rng: random.Random) -> dict[str, Any]:
    listed = {"no_rope_layers": [rng.choice((0, 1)) for _ in range(8)]}
    return rng.choice([{}, {"no_rope_layer_interval": 2}, listed])


def _qwen_windows(rng: random.Random) -> dict[str, Any]:
    some = {"use_sliding_window": True, "sliding_window": 5}
    few = some | {"max_window_layers": 1}
    kinds = {"layer_types": ["full_attention", "sliding_attention"] * 2}
    return rng.choice([{}, some, few, some | kinds])


def _exaone_windows(rng: random.Random) -> dict[str, Any]:
    window = {"sliding_window": rng.choice((5, 16))}
    every = window | {"sliding_window_pattern": rng.choice((1, 2, 4))}
    no_window = {"sliding_window": None, "layer_types": ["full_attention"] * 8}
    kinds = _kinds(rng) | {"sliding_window_pattern": "LLLG"}
    listed = window | kinds if "layer_types" in kinds else window
    return rng.choice([{}, every, listed, no_window])


def _convs(rng: random.Random) -> dict[str, Any]:
    """The first layer has attention, as `Zoo.fields` may say that there is no other."""
    kinds = ("conv", "conv", "full_attention")
    return {"layer_types": ["full_attention", *(rng.choice(kinds) for _ in range(7))]}


def _gpt_neo_layers(rng: random.Random) -> dict[str, Any]:
    pairs = [[["global", "local"], rng.choice((1, 2))]]
    types = rng.choice([pairs, pairs, [[["local"], 1], [["global"], 2]], [[["global"], 1]]])
    kinds = [kind for kinds, count in types for kind in kinds * count]
    listed = {"attention_layers": kinds} if rng.random() < 0.5 else {}
    return {"num_layers": len(kinds), "attention_types": types} | listed


def _gpt_neox_rope(rng: random.Random) -> dict[str, Any]:
    older = {"rotary_pct": rng.choice((0.25, 0.5, 1.0)), "rotary_emb_base": rng.choice(_THETA)}
    newer = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    linear = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    return rng.choice([{}, older, older | linear, {"rope_parameters": newer}])


def _bloom_heads(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice((2, 4, 6, 12))
    hidden, name = rng.choice((8, 12)) * heads, rng.choice(("hidden_size", "n_embed"))
    return {name: hidden, rng.choice(("n_head", "num_attention_heads")): heads}


def _falcon_layers(rng: random.Random) -> dict[str, Any]:
    newer = {"new_decoder_architecture": True, "num_kv_heads": rng.choice((1, 2, 4))}
    older = {"multi_query": rng.choice(_BOOL), "parallel_attn": rng.choice(_BOOL)}
    norms = {"num_ln_in_parallel_attn": rng.choice((1, 2))}
    return rng.choice([{}, older, older, newer, newer | norms])


def _groups(rng: random.Random) -> dict[str, Any]:
    """Groups of experts, of which as many are chosen as the experts of a token need."""
    groups, best, each = rng.choice(((1, 1, 4), (2, 1, 2), (4, 2, 3), (4, 4, 4), (4, 3, 1)))
    return {"n_group": groups, "topk_group": best, "num_experts_per_tok": each}


def _plain_mlps(rng: random.Random) -> dict[str, Any]:
    """Nothing, or the kind of MLP of each layer, and their number."""
    kinds = [rng.choice(("dense", "sparse")) for _ in range(rng.choice((1, 2, 4)))]
    return rng.choice([{}, {"mlp_layer_types": kinds, "num_hidden_layers": len(kinds)}])


def _latent_rope(rng: random.Random) -> dict[str, Any]:
    """The default of num_key_value_heads is not that of heads, and is always given."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT // 4}
    mscale = {"mscale": 0.7, "mscale_all_dim": rng.choice((0.5, 1.2))}
    rules = rng.choice([{}, {"rope_scaling": yarn}, {"rope_scaling": yarn | mscale}])
    heads = rng.choice((4, 8))
    return rules | {"num_attention_heads": heads, "num_key_value_heads": heads}


def _alpha(rng: random.Random) -> dict[str, Any]:
    theta = {"rope_theta": rng.choice(_THETA)}
    rule = {"alpha": rng.choice((1.0, 50.0, 1000.0)), "factor": 1.0}
    newer = {"rope_parameters": rule | theta | {"rope_type": "dynamic"}}
    return rng.choice([newer, theta | {"rope_scaling": rule | {"type": "dynamic"}}])


def _helium_heads(rng: random.Random) -> dict[str, Any]:
    heads, width = rng.choice((4, 8)), rng.choice((8, 12))
    return {"hidden_size": heads * width, "num_attention_heads": heads, "head_dim": width}


ZOOS: dict[str, Zoo] = {
    "apertus": Zoo(
        {"apertus": "ApertusForCausalLM"},
        _RMS
        | {
            "head_dim": (8, 16),
            "attention_bias": _BOOL,
            "hidden_act": ("xielu", "xielu", "xielu", "relu2", "silu"),
        },
        _rope(),
    ),
    "arcee": Zoo(
        {"arcee": "ArceeForCausalLM"},
        _RMS | {"head_dim": (None, 8, 16)} | {"attention_bias": _BOOL, "mlp_bias": _BOOL},
        _rope(),
    ),
    "bloom": Zoo(
        {"bloom": "BloomForCausalLM"},
        {
            "n_layer": (1, 2, 4),
            "layer_norm_epsilon": _EPS,
            "tie_word_embeddings": _BOOL,
            "seq_length": (CONTEXT,),
            "pretraining_tp": (1, 2),
        },
        _bloom_heads,
    ),
    "codegen": Zoo({"codegen": "CodeGenForCausalLM"}, _GPTJ),
    "cohere": Zoo(
        {"cohere": "CohereForCausalLM"},
        _LAYER_NORM | {"attention_bias": _BOOL, "logit_scale": (0.0625, 1.0, 3.0)},
        _rope(),
    ),
    "cohere2": Zoo(
        {"cohere2": "Cohere2ForCausalLM"},
        _LAYER_NORM
        | {
            "attention_bias": _BOOL,
            "logit_scale": (0.0625, 3.0),
            "sliding_window": (5, 16),
            "sliding_window_pattern": (2, 4),
        },
        _both(_rope(), _kinds),
    ),
    "deepseek_v3": Zoo(
        {"deepseek_v3": "DeepseekV3ForCausalLM"},
        {name: values for name, values in _RMS.items() if name != "num_key_value_heads"}
        | _ROUTED
        | _LATENT,
        _both(_latent_rope, _groups),
    ),
    "ernie4_5": Zoo(
        {"ernie4_5": "Ernie4_5ForCausalLM"},
        _RMS | {"use_bias": _BOOL, "head_dim": (8, 16)},
        _rope(),
    ),
    "ernie4_5_moe": Zoo(
        {"ernie4_5_moe": "Ernie4_5_MoeForCausalLM"},
        _RMS
        | {
            "use_bias": _BOOL,
            "moe_num_experts": (4, 8),
            "moe_k": (1, 2, 4),
            "moe_intermediate_size": (24, 40),
            "moe_num_shared_experts": (0, 1, 2),
            "moe_layer_start_index": (0, 1),
            "moe_layer_end_index": (-1, 1, 2),
            "moe_layer_interval": (1, 2),
        },
        _rope(),
    ),
    "exaone4": Zoo(
        {"exaone4": "Exaone4ForCausalLM"},
        _RMS | {"head_dim": (8, 16)},
        _both(_rope(), _exaone_windows),
    ),
    "falcon": Zoo(
        {"falcon": "FalconForCausalLM"},
        {
            "hidden_size": (32, 64),
            "ffn_hidden_size": (None, 96),
            "num_hidden_layers": (1, 2, 4),
            "num_attention_heads": (4, 8),
            "max_position_embeddings": (CONTEXT,),
            "tie_word_embeddings": _BOOL,
            "activation": _ACTIVATIONS,
            "layer_norm_epsilon": _EPS,
            "bias": _BOOL,
        },
        _both(_rope(), _falcon_layers),
    ),
    "gemma": Zoo(
        {"gemma": "GemmaForCausalLM"},
        _RMS | {"head_dim": (8, 16), "attention_bias": _BOOL},
        _rope(),
    ),
    "gemma2": Zoo(
        {"gemma2": "Gemma2ForCausalLM"},
        _RMS
        | {
            "head_dim": (8, 16),
            "attention_bias": _BOOL,
            "hidden_activation": ("gelu_pytorch_tanh", "silu"),
            "query_pre_attn_scalar": (8, 20),
            "sliding_window": (5, 16),
            "final_logit_softcapping": (None, 1.0, 30.0),
            "attn_logit_softcapping": (None, 0.5, 50.0),
        },
        _both(_rope(), _kinds),
    ),
    "glm4": Zoo(
        {"glm4": "Glm4ForCausalLM", "glm": "GlmForCausalLM"},
        _RMS | {"head_dim": (8, 16), "attention_bias": _BOOL},
        _rope(partial=(0.5, 1.0)),
    ),
    "glm4_moe": Zoo(
        {"glm4_moe": "Glm4MoeForCausalLM"},
        _RMS | _ROUTED | {"head_dim": (8, 16), "attention_bias": _BOOL, "use_qk_norm": _BOOL},
        _both(_rope(partial=(0.5, 1.0)), _groups),
    ),
    "glm4_moe_lite": Zoo(
        {"glm4_moe_lite": "Glm4MoeLiteForCausalLM"},
        {name: values for name, values in _RMS.items() if name != "num_key_value_heads"}
        | {name: values for name, values in _ROUTED.items() if name != "first_k_dense_replace"}
        | _LATENT,
        _both(_latent_rope, _groups, _plain_mlps),
    ),
    "gpt_bigcode": Zoo(
        {"gpt_bigcode": "GPTBigCodeForCausalLM"},
        {
            "n_embd": (32, 64),
            "n_head": (4, 8),
            "n_layer": (1, 2, 4),
            "n_inner": (None, 96),
            "n_positions": (CONTEXT,),
            "activation_function": _ACTIVATIONS,
            "layer_norm_epsilon": _EPS,
            "tie_word_embeddings": _BOOL,
            "multi_query": _BOOL,
            "scale_attn_weights": _BOOL,
        },
    ),
    "gpt_neo": Zoo(
        {"gpt_neo": "GPTNeoForCausalLM"},
        {
            "hidden_size": (32, 64),
            "intermediate_size": (None, 96),
            "num_heads": (4, 8),
            "max_position_embeddings": (CONTEXT,),
            "activation_function": _ACTIVATIONS,
            "layer_norm_epsilon": _EPS,
            "tie_word_embeddings": _BOOL,
            "window_size": (5, 16, 256),
        },
        _gpt_neo_layers,
    ),
    "gpt_neox": Zoo(
        {"gpt_neox": "GPTNeoXForCausalLM"},
        {name: values for name, values in _LAYER_NORM.items() if name != "num_key_value_heads"}
        | {"use_parallel_residual": _BOOL, "attention_bias": _BOOL, "hidden_size": (64,)},
        _gpt_neox_rope,
    ),
    "gpt_oss": Zoo(
        {"gpt_oss": "GptOssForCausalLM"},
        _RMS
        | {
            "head_dim": (8, 16),
            "attention_bias": _BOOL,
            "sliding_window": (5, 16),
            "num_local_experts": (4, 8),
            "num_experts_per_tok": (1, 2, 4),
            "swiglu_alpha": (1.0, 1.702),
            "swiglu_limit": (0.5, 7.0),
        },
        _both(_rope(), _kinds),
    ),
    "gptj": Zoo({"gptj": "GPTJForCausalLM"}, _GPTJ),
    "granite": Zoo(
        {"granite": "GraniteForCausalLM"},
        _RMS
        | {
            "attention_bias": _BOOL,
            "mlp_bias": _BOOL,
            "embedding_multiplier": (1.0, 12.0),
            "attention_multiplier": (0.1, 0.5),
            "residual_multiplier": (0.22, 1.0),
            "logits_scaling": (1.0, 8.0),
        },
        _rope(),
    ),
    "granitemoe": Zoo({"granitemoe": "GraniteMoeForCausalLM"}, _GRANITE_MOE, _rope()),
    "granitemoeshared": Zoo(
        {"granitemoeshared": "GraniteMoeSharedForCausalLM"},
        _GRANITE_MOE | {"shared_intermediate_size": (0, 24, 56)},
        _rope(),
    ),
    "helium": Zoo(
        {"helium": "HeliumForCausalLM"},
        _RMS | {"rms_norm_eps": (1e-8, 1e-3), "attention_bias": _BOOL, "mlp_bias": _BOOL},
        _both(_rope(), _helium_heads),
    ),
    "hunyuan_v1_dense": Zoo(
        {"hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM"},
        _RMS | {"head_dim": (8, 16), "attention_bias": _BOOL},
        lambda rng: _rope()(rng) if rng.random() < 0.5 else _alpha(rng),
    ),
    "lfm2_moe": Zoo(
        {"lfm2_moe": "Lfm2MoeForCausalLM"},
        {name: values for name, values in _COMMON.items() if name != "hidden_act"}
        | {
            "norm_eps": _EPS,
            "head_dim": (8, 16),
            "conv_bias": _BOOL,
            "conv_L_cache": (2, 3, 4),
            "num_dense_layers": (0, 1, 2),
            "num_experts": (4, 8),
            "num_experts_per_tok": (1, 2, 4),
            "moe_intermediate_size": (24, 40),
            "use_expert_bias": _BOOL,
            "norm_topk_prob": _BOOL,
            "routed_scaling_factor": (1.0, 2.5),
        },
        _both(_rope(), _convs),
    ),
    "ministral": Zoo(
        {"ministral": "MinistralForCausalLM"},
        _RMS | {"head_dim": (8, 16), "sliding_window": (5, 16)},
        _both(_rope(), _kinds),
    ),
    "minimax_m2": Zoo(
        {"minimax_m2": "MiniMaxM2ForCausalLM"},
        _RMS
        | {
            "head_dim": (8, 16),
            "num_local_experts": (4, 8),
            "num_experts_per_tok": (1, 2, 4),
            "rotary_dim": (None, 4, 8),
        },
        _rope(),
    ),
    "mixtral": Zoo(
        {"mixtral": "MixtralForCausalLM"},
        _RMS
        | {
            "head_dim": (8, 16),
            "num_local_experts": (4, 8),
            "num_experts_per_tok": (1, 2, 4),
            "sliding_window": (None, 5, 16),
        },
        _rope(),
    ),
    "nemotron": Zoo(
        {"nemotron": "NemotronForCausalLM"},
        _COMMON
        | {"norm_eps": _EPS, "attention_bias": _BOOL, "mlp_bias": _BOOL, "hidden_size": (32, 64)},
        _rope(partial=(0.5, 1.0)),
    ),
    "olmo": Zoo(
        {"olmo": "OlmoForCausalLM"},
        _COMMON | {"attention_bias": _BOOL, "clip_qkv": (None, 0.5, 2.0)},
        _rope(),
    ),
    "olmo2": Zoo({"olmo2": "Olmo2ForCausalLM"}, _RMS | {"attention_bias": _BOOL}, _rope()),
    "olmo3": Zoo(
        {"olmo3": "Olmo3ForCausalLM"},
        _RMS | {"attention_bias": _BOOL, "sliding_window": (5, 16)},
        _both(_olmo3_rope, _kinds),
    ),
    "olmoe": Zoo(
        {"olmoe": "OlmoeForCausalLM"},
        {name: values for name, values in _RMS.items() if name != "tie_word_embeddings"}
        | {
            "attention_bias": _BOOL,
            "num_experts": (4, 8),
            "num_experts_per_tok": (1, 2, 4),
            "norm_topk_prob": _BOOL,
        },
        _rope(),
    ),
    "opt": Zoo(
        {"opt": "OPTForCausalLM"},
        {
            "hidden_size": (32, 48, 64),
            "ffn_dim": (40, 96),
            "num_hidden_layers": (1, 2, 4),
            "num_attention_heads": (4, 8),
            "max_position_embeddings": (CONTEXT,),
            "tie_word_embeddings": _BOOL,
            "activation_function": _ACTIVATIONS,
            "do_layer_norm_before": _BOOL,
            "_remove_final_layer_norm": _BOOL,
            "word_embed_proj_dim": (None, 24, 64),
            "enable_bias": _BOOL,
        },
    ),
    "phi": Zoo(
        {"phi": "PhiForCausalLM"},
        _LAYER_NORM | {"hidden_size": (64,)},
        _rope(partial=(0.25, 0.5, 1.0)),
    ),
    "phi3": Zoo({"phi3": "Phi3ForCausalLM"}, _RMS | {"sliding_window": (None, 5, 16)}, _phi3_rope),
    "phimoe": Zoo(
        {"phimoe": "PhimoeForCausalLM"},
        _RMS
        | {
            "head_dim": (16,),
            "attention_bias": _BOOL,
            "lm_head_bias": _BOOL,
            "num_local_experts": (2, 4, 8),
            "router_jitter_noise": (0.0, 0.01, 0.2, 1.0),
            "sliding_window": (None, 5, 16),
        },
        _phimoe_rope,
    ),
    "qwen2_moe": Zoo(
        {"qwen2_moe": "Qwen2MoeForCausalLM"},
        _RMS
        | {
            "num_experts": (4, 8),
            "num_experts_per_tok": (1, 2, 4),
            "moe_intermediate_size": (24, 40),
            "shared_expert_intermediate_size": (24, 56),
            "norm_topk_prob": _BOOL,
            "qkv_bias": _BOOL,
            "mlp_only_layers": ([], [0]),
            "decoder_sparse_step": (1, 2),
        },
        _both(_rope(), _qwen_windows),
    ),
    "seed_oss": Zoo(
        {"seed_oss": "SeedOssForCausalLM"},
        _RMS
        | {
            "head_dim": (None, 8, 16),
            "attention_bias": _BOOL,
            "attention_out_bias": _BOOL,
            "mlp_bias": _BOOL,
        },
        _rope(),
    ),
    "smollm3": Zoo(
        {"smollm3": "SmolLM3ForCausalLM"},
        _RMS
        | {
            "attention_bias": _BOOL,
            "mlp_bias": _BOOL,
            "use_sliding_window": _BOOL,
            "sliding_window": (None, 5, 16),
        },
        _both(_rope(), _no_rope),
    ),
    "stablelm": Zoo(
        {"stablelm": "StableLmForCausalLM"},
        _LAYER_NORM | {"use_qkv_bias": _BOOL, "use_parallel_residual": _BOOL, "hidden_size": (64,)},
        _rope(partial=(0.25, 0.5, 1.0)),
    ),
    "starcoder2": Zoo(
        {"starcoder2": "Starcoder2ForCausalLM"},
        _COMMON | {"norm_epsilon": _EPS, "use_bias": _BOOL, "sliding_window": (None, 5, 16)},
        _rope(),
    ),
}


def draw(family: str, index: int) -> dict[str, Any]:
    """Return configuration `index` of a family, the same whenever it is made."""
    zoo, rng = ZOOS[family], random.Random(f"{family} {index}")
    model_type = list(zoo.architectures)[index % len(zoo.architectures)]
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [zoo.architectures[model_type]],
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config |= {name: rng.choice(values) for name, values in zoo.fields.items()}
    config |= zoo.more(rng)
    for name in ("layer_types", "no_rope_layers"):
        if name in config:
            config[name] = config[name][: config["num_hidden_layers"]]
    return config
