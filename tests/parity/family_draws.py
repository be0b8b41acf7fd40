"""Values of the fields of families' configurations, and draws of fields that belong together."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

CONTEXT = 96

Draw = Callable[[random.Random], dict[str, Any]]

BOOL = (False, True)
THETA = (500.0, 10000.0, 500000.0)
EPS = (1e-6, 1e-5, 1e-3)
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2")
COMMON: dict[str, tuple[Any, ...]] = {
    "hidden_size": (32, 48, 64),
    "intermediate_size": (40, 64, 96),
    "num_hidden_layers": (1, 2, 4),
    "num_attention_heads": (4, 8),
    "num_key_value_heads": (1, 2, 4),
    "max_position_embeddings": (CONTEXT,),
    "tie_word_embeddings": BOOL,
    "hidden_act": ACTIVATIONS,
}
RMS = COMMON | {"rms_norm_eps": EPS}
ROUTED: dict[str, tuple[Any, ...]] = {
    "n_routed_experts": (8, 16),
    "n_shared_experts": (1, 2),
    "moe_intermediate_size": (24, 40),
    "first_k_dense_replace": (0, 1),
    "norm_topk_prob": BOOL,
    "routed_scaling_factor": (1.0, 2.5),
}
GRANITE_MOE: dict[str, tuple[Any, ...]] = RMS | {
    "attention_bias": BOOL,
    "embedding_multiplier": (1.0, 12.0),
    "attention_multiplier": (0.1, 0.5),
    "residual_multiplier": (0.22, 1.0),
    "logits_scaling": (1.0, 8.0),
    "num_local_experts": (4, 8),
    "num_experts_per_tok": (1, 2, 4),
}
MAMBA: dict[str, tuple[Any, ...]] = {
    "mamba_n_heads": (4, 8),
    "mamba_n_groups": (1, 2, 4),
    "mamba_d_state": (8, 24),
    "mamba_d_conv": (2, 3, 4),
    "mamba_chunk_size": (8, 256),
    "mamba_conv_bias": BOOL,
    "mamba_proj_bias": BOOL,
    "time_step_limit": ([0.0, float("inf")], [0.0001, 100.0]),
}
NEMOTRON_H_COMMON = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    "max_position_embeddings",
)
GPTJ: dict[str, tuple[Any, ...]] = {
    "n_embd": (64,),
    "n_head": (4, 8),
    "n_layer": (1, 2, 4),
    "n_inner": (None, 96),
    "n_positions": (CONTEXT,),
    "rotary_dim": (2, 4, 8),
    "activation_function": ACTIVATIONS,
    "layer_norm_epsilon": EPS,
    "tie_word_embeddings": BOOL,
}
LATENT: dict[str, tuple[Any, ...]] = {
    "kv_lora_rank": (16, 24),
    "q_lora_rank": (None, 20),
    "qk_rope_head_dim": (4, 8),
    "qk_nope_head_dim": (8, 12),
    "v_head_dim": (8, 20),
    "rope_interleave": BOOL,
    "attention_bias": BOOL,
}
LAYER_NORM = COMMON | {"layer_norm_eps": EPS}


def rope(*, partial: tuple[float, ...] = ()) -> Draw:
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
            found["rope_theta"] = rng.choice(THETA)
        if partial and rng.random() < 0.7:
            found["partial_rotary_factor"] = rng.choice(partial)
        if rng.random() < 0.5:
            return {"rope_parameters": rules | found}
        return found | ({} if rules["rope_type"] == "default" else {"rope_scaling": rules})

    return draw


def kinds(rng: random.Random) -> dict[str, Any]:
    """Nothing, or a kind of attention for each layer; `Zoo.fields` has their number."""
    kinds = ("full_attention", "sliding_attention")
    return {} if rng.random() < 0.5 else {"layer_types": [rng.choice(kinds) for _ in range(8)]}


def both(*draws: Draw) -> Draw:
    def draw(rng: random.Random) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for one in draws:
            found |= one(rng)
        return found

    return draw


def olmo3_rope(rng: random.Random) -> dict[str, Any]:
    theta = {"rope_theta": rng.choice(THETA)}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
    nested = {"full_attention": yarn | theta, "sliding_attention": {"rope_type": "default"} | theta}
    return rng.choice([{}, theta, theta | {"rope_scaling": yarn}, {"rope_parameters": nested}])


def phi3_rope(rng: random.Random) -> dict[str, Any]:
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
    return found | rng.choice([{}, {"rope_scaling": rule}, {"rope_theta": rng.choice(THETA)}])


def phimoe_rope(rng: random.Random) -> dict[str, Any]:
    """Lists of longrope for heads of 16 features."""
    rule: dict[str, Any] = {
        name: [start + rng.random() for _ in range(8)]
        for name, start in (("short_factor", 1), ("long_factor", 2))
    }
    rule |= {"short_mscale": rng.choice((1.0, 1.25)), "long_mscale": 1.5}
    rule |= {"rope_type": "longrope", "original_max_position_embeddings": CONTEXT // 2}
    theta = {"rope_theta": rng.choice(THETA)}
    newer = {"rope_parameters": rule | theta}
    return rng.choice([{}, theta, newer, theta | {"rope_scaling": rule}])


def no_rope(rng: random.Random) -> dict[str, Any]:
    listed = {"no_rope_layers": [rng.choice((0, 1)) for _ in range(8)]}
    return rng.choice([{}, {"no_rope_layer_interval": 2}, listed])


def qwen_windows(rng: random.Random) -> dict[str, Any]:
    some = {"use_sliding_window": True, "sliding_window": 5}
    few = some | {"max_window_layers": 1}
    kinds = {"layer_types": ["full_attention", "sliding_attention"] * 2}
    return rng.choice([{}, some, few, some | kinds])


def exaone_windows(rng: random.Random) -> dict[str, Any]:
    window = {"sliding_window": rng.choice((5, 16))}
    every = window | {"sliding_window_pattern": rng.choice((1, 2, 4))}
    no_window = {"sliding_window": None, "layer_types": ["full_attention"] * 8}
    named = kinds(rng) | {"sliding_window_pattern": "LLLG"}
    listed = window | named if "layer_types" in named else window
    return rng.choice([{}, every, listed, no_window])


def convs(rng: random.Random) -> dict[str, Any]:
    """The first layer has attention, as `Zoo.fields` may say that there is no other."""
    kinds = ("conv", "conv", "full_attention")
    return {"layer_types": ["full_attention", *(rng.choice(kinds) for _ in range(7))]}


def falcon_h1_multipliers(rng: random.Random) -> dict[str, Any]:
    """Multipliers, each 1, absent or another number."""
    names = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    found: dict[str, Any] = {
        f"{name}_multiplier": rng.choice((1.0, 0.25, 1.5)) for name in names if rng.random() < 0.7
    }
    for name, count in (("mlp", 2), ("ssm", 5)):
        if rng.random() < 0.7:
            found[f"{name}_multipliers"] = [rng.choice((0.5, 1.0, 1.25)) for _ in range(count)]
    return found


def mambas(rng: random.Random) -> dict[str, Any]:
    """Layers with Mamba-2 behind one with attention, in older or newer names."""
    attention, mamba = rng.choice((("attention", "mamba"), ("full_attention", "linear_attention")))
    return {"layer_types": [attention, *(rng.choice((mamba, mamba, attention)) for _ in range(7))]}


def nemotron_h_layers(rng: random.Random) -> dict[str, Any]:
    """One layer of each kind or none, at least one with attention, in names or letters."""
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    found = ["full_attention", *rng.choices(list(letters), k=rng.choice((2, 4, 5)))]
    rng.shuffle(found)
    if rng.random() < 0.5:
        return {"hybrid_override_pattern": "".join(letters[one] for one in found)}
    if rng.random() < 0.5:
        older = {"linear_attention": "mamba", "full_attention": "attention"}
        found = [older.get(one, one) for one in found]
    return {rng.choice(("layers_block_type", "layer_types")): found}


def internlm3_biases(rng: random.Random) -> dict[str, Any]:
    """Both kinds of biases or none, as transformers has them, by either of their names."""
    has = rng.random() < 0.5
    names = rng.choice((("qkv_bias", "bias"), ("attention_bias", "mlp_bias")))
    return dict.fromkeys(names, has)


def gpt_neo_layers(rng: random.Random) -> dict[str, Any]:
    pairs = [[["global", "local"], rng.choice((1, 2))]]
    types = rng.choice([pairs, pairs, [[["local"], 1], [["global"], 2]], [[["global"], 1]]])
    kinds = [kind for kinds, count in types for kind in kinds * count]
    listed = {"attention_layers": kinds} if rng.random() < 0.5 else {}
    return {"num_layers": len(kinds), "attention_types": types} | listed


def gpt_neox_rope(rng: random.Random) -> dict[str, Any]:
    older = {"rotary_pct": rng.choice((0.25, 0.5, 1.0)), "rotary_emb_base": rng.choice(THETA)}
    newer = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    linear = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    return rng.choice([{}, older, older | linear, {"rope_parameters": newer}])


def bloom_heads(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice((2, 4, 6, 12))
    hidden, name = rng.choice((8, 12)) * heads, rng.choice(("hidden_size", "n_embed"))
    return {name: hidden, rng.choice(("n_head", "num_attention_heads")): heads}


def falcon_layers(rng: random.Random) -> dict[str, Any]:
    newer = {"new_decoder_architecture": True, "num_kv_heads": rng.choice((1, 2, 4))}
    older = {"multi_query": rng.choice(BOOL), "parallel_attn": rng.choice(BOOL)}
    norms = {"num_ln_in_parallel_attn": rng.choice((1, 2))}
    return rng.choice([{}, older, older, newer, newer | norms])


def groups(rng: random.Random) -> dict[str, Any]:
    """Groups of experts, of which as many are chosen as the experts of a token need."""
    groups, best, each = rng.choice(((1, 1, 4), (2, 1, 2), (4, 2, 3), (4, 4, 4), (4, 3, 1)))
    return {"n_group": groups, "topk_group": best, "num_experts_per_tok": each}


def plain_mlps(rng: random.Random) -> dict[str, Any]:
    """Nothing, or the kind of MLP of each layer, and their number."""
    kinds = [rng.choice(("dense", "sparse")) for _ in range(rng.choice((1, 2, 4)))]
    return rng.choice([{}, {"mlp_layer_types": kinds, "num_hidden_layers": len(kinds)}])


def ministral3_rope(rng: random.Random) -> dict[str, Any]:
    rules = ({"rope_type": "default"}, {"type": "linear", "factor": 2.0}, {"rope_type": "yarn"})
    rule = {"factor": 4.0} | rng.choice(rules) | {"llama_4_scaling_beta": rng.choice((0.1, 1.0))}
    rule |= {"original_max_position_embeddings": rng.choice((4, 8, 24))}
    theta = {"rope_theta": rng.choice(THETA)}
    return rng.choice([{}, {"rope_parameters": rule | theta}, theta | {"rope_scaling": rule}])


def latent_rope(rng: random.Random) -> dict[str, Any]:
    """The default of num_key_value_heads is not that of heads, and is always given."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT // 4}
    mscale = {"mscale": 0.7, "mscale_all_dim": rng.choice((0.5, 1.2))}
    rules = rng.choice([{}, {"rope_scaling": yarn}, {"rope_scaling": yarn | mscale}])
    heads = rng.choice((4, 8))
    return rules | {"num_attention_heads": heads, "num_key_value_heads": heads}


def alpha(rng: random.Random) -> dict[str, Any]:
    theta = {"rope_theta": rng.choice(THETA)}
    rule = {"alpha": rng.choice((1.0, 50.0, 1000.0)), "factor": 1.0}
    newer = {"rope_parameters": rule | theta | {"rope_type": "dynamic"}}
    return rng.choice([newer, theta | {"rope_scaling": rule | {"type": "dynamic"}}])


def helium_heads(rng: random.Random) -> dict[str, Any]:
    heads, width = rng.choice((4, 8)), rng.choice((8, 12))
    return {"hidden_size": heads * width, "num_attention_heads": heads, "head_dim": width}
