"""Random small configurations of families, drawn from the values that their fields may have."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

from tests.parity import family_draws as draws

VOCAB_SIZE = 64


@dataclasses.dataclass(frozen=True)
class Zoo:
    """The configurations of one family: an architecture of each `model_type`, and the values of its
    fields. `more` draws fields that belong together.
    """

    architectures: Mapping[str, str]
    fields: Mapping[str, tuple[Any, ...]]
    more: draws.Draw = lambda _: {}


ZOOS: dict[str, Zoo] = {
    "apertus": Zoo(
        {"apertus": "ApertusForCausalLM"},
        draws.RMS
        | {
            "head_dim": (8, 16),
            "attention_bias": draws.BOOL,
            "hidden_act": ("xielu", "xielu", "xielu", "relu2", "silu"),
        },
        draws.rope(),
    ),
    "arcee": Zoo(
        {"arcee": "ArceeForCausalLM"},
        draws.RMS
        | {"head_dim": (None, 8, 16)}
        | {"attention_bias": draws.BOOL, "mlp_bias": draws.BOOL},
        draws.rope(),
    ),
    "bloom": Zoo(
        {"bloom": "BloomForCausalLM"},
        {
            "n_layer": (1, 2, 4),
            "layer_norm_epsilon": draws.EPS,
            "tie_word_embeddings": draws.BOOL,
            "seq_length": (draws.CONTEXT,),
            "pretraining_tp": (1, 2),
        },
        draws.bloom_heads,
    ),
    "codegen": Zoo({"codegen": "CodeGenForCausalLM"}, draws.GPTJ),
    "cohere": Zoo(
        {"cohere": "CohereForCausalLM"},
        draws.LAYER_NORM | {"attention_bias": draws.BOOL, "logit_scale": (0.0625, 1.0, 3.0)},
        draws.rope(),
    ),
    "cohere2": Zoo(
        {"cohere2": "Cohere2ForCausalLM"},
        draws.LAYER_NORM
        | {
            "attention_bias": draws.BOOL,
            "logit_scale": (0.0625, 3.0),
            "sliding_window": (5, 16),
            "sliding_window_pattern": (2, 4),
        },
        draws.both(draws.rope(), draws.kinds),
    ),
    "deepseek_v3": Zoo(
        {"deepseek_v3": "DeepseekV3ForCausalLM"},
        {name: values for name, values in draws.RMS.items() if name != "num_key_value_heads"}
        | draws.ROUTED
        | draws.LATENT,
        draws.both(draws.latent_rope, draws.groups),
    ),
    "dots1": Zoo(
        {"dots1": "Dots1ForCausalLM"},
        draws.RMS
        | draws.ROUTED
        | {
            "attention_bias": draws.BOOL,
            "sliding_window": (None, 5, 16),
            "max_window_layers": (1, 62),
        },
        draws.both(draws.rope(), draws.groups),
    ),
    "ernie4_5": Zoo(
        {"ernie4_5": "Ernie4_5ForCausalLM"},
        draws.RMS | {"use_bias": draws.BOOL, "head_dim": (8, 16)},
        draws.rope(),
    ),
    "ernie4_5_moe": Zoo(
        {"ernie4_5_moe": "Ernie4_5_MoeForCausalLM"},
        draws.RMS
        | {
            "use_bias": draws.BOOL,
            "moe_num_experts": (4, 8),
            "moe_k": (1, 2, 4),
            "moe_intermediate_size": (24, 40),
            "moe_num_shared_experts": (0, 1, 2),
            "moe_layer_start_index": (0, 1),
            "moe_layer_end_index": (-1, 1, 2),
            "moe_layer_interval": (1, 2),
        },
        draws.rope(),
    ),
    "exaone4": Zoo(
        {"exaone4": "Exaone4ForCausalLM"},
        draws.RMS | {"head_dim": (8, 16)},
        draws.both(draws.rope(), draws.exaone_windows),
    ),
    "falcon": Zoo(
        {"falcon": "FalconForCausalLM"},
        {
            "hidden_size": (32, 64),
            "ffn_hidden_size": (None, 96),
            "num_hidden_layers": (1, 2, 4),
            "num_attention_heads": (4, 8),
            "max_position_embeddings": (draws.CONTEXT,),
            "tie_word_embeddings": draws.BOOL,
            "activation": draws.ACTIVATIONS,
            "layer_norm_epsilon": draws.EPS,
            "bias": draws.BOOL,
        },
        draws.both(draws.rope(), draws.falcon_layers),
    ),
    "falcon_h1": Zoo(
        {"falcon_h1": "FalconH1ForCausalLM"},
        draws.RMS
        | draws.MAMBA
        | {
            "attention_bias": draws.BOOL,
            "mlp_bias": draws.BOOL,
            "projectors_bias": draws.BOOL,
            "mamba_d_ssm": (None, 32, 64),
            "mamba_rms_norm": draws.BOOL,
            "mamba_norm_before_gate": draws.BOOL,
        },
        draws.both(draws.rope(), draws.falcon_h1_multipliers),
    ),
    "gemma": Zoo(
        {"gemma": "GemmaForCausalLM"},
        draws.RMS | {"head_dim": (8, 16), "attention_bias": draws.BOOL},
        draws.rope(),
    ),
    "gemma2": Zoo(
        {"gemma2": "Gemma2ForCausalLM"},
        draws.RMS
        | {
            "head_dim": (8, 16),
            "attention_bias": draws.BOOL,
            "hidden_activation": ("gelu_pytorch_tanh", "silu"),
            "query_pre_attn_scalar": (8, 20),
            "sliding_window": (5, 16),
            "final_logit_softcapping": (None, 1.0, 30.0),
            "attn_logit_softcapping": (None, 0.5, 50.0),
        },
        draws.both(draws.rope(), draws.kinds),
    ),
    "glm4": Zoo(
        {"glm4": "Glm4ForCausalLM", "glm": "GlmForCausalLM"},
        draws.RMS | {"head_dim": (8, 16), "attention_bias": draws.BOOL},
        draws.rope(partial=(0.5, 1.0)),
    ),
    "glm4_moe": Zoo(
        {"glm4_moe": "Glm4MoeForCausalLM"},
        draws.RMS
        | draws.ROUTED
        | {"head_dim": (8, 16), "attention_bias": draws.BOOL, "use_qk_norm": draws.BOOL},
        draws.both(draws.rope(partial=(0.5, 1.0)), draws.groups),
    ),
    "glm4_moe_lite": Zoo(
        {"glm4_moe_lite": "Glm4MoeLiteForCausalLM"},
        {name: values for name, values in draws.RMS.items() if name != "num_key_value_heads"}
        | {name: values for name, values in draws.ROUTED.items() if name != "first_k_dense_replace"}
        | draws.LATENT,
        draws.both(draws.latent_rope, draws.groups, draws.plain_mlps),
    ),
    "gpt_bigcode": Zoo(
        {"gpt_bigcode": "GPTBigCodeForCausalLM"},
        {
            "n_embd": (32, 64),
            "n_head": (4, 8),
            "n_layer": (1, 2, 4),
            "n_inner": (None, 96),
            "n_positions": (draws.CONTEXT,),
            "activation_function": draws.ACTIVATIONS,
            "layer_norm_epsilon": draws.EPS,
            "tie_word_embeddings": draws.BOOL,
            "multi_query": draws.BOOL,
            "scale_attn_weights": draws.BOOL,
        },
    ),
    "gpt_neo": Zoo(
        {"gpt_neo": "GPTNeoForCausalLM"},
        {
            "hidden_size": (32, 64),
            "intermediate_size": (None, 96),
            "num_heads": (4, 8),
            "max_position_embeddings": (draws.CONTEXT,),
            "activation_function": draws.ACTIVATIONS,
            "layer_norm_epsilon": draws.EPS,
            "tie_word_embeddings": draws.BOOL,
            "window_size": (5, 16, 256),
        },
        draws.gpt_neo_layers,
    ),
    "gpt_neox": Zoo(
        {"gpt_neox": "GPTNeoXForCausalLM"},
        {name: values for name, values in draws.LAYER_NORM.items() if name != "num_key_value_heads"}
        | {"use_parallel_residual": draws.BOOL, "attention_bias": draws.BOOL, "hidden_size": (64,)},
        draws.gpt_neox_rope,
    ),
    "gpt_oss": Zoo(
        {"gpt_oss": "GptOssForCausalLM"},
        draws.RMS
        | {
            "head_dim": (8, 16),
            "attention_bias": draws.BOOL,
            "sliding_window": (5, 16),
            "num_local_experts": (4, 8),
            "num_experts_per_tok": (1, 2, 4),
            "swiglu_alpha": (1.0, 1.702),
            "swiglu_limit": (0.5, 7.0),
        },
        draws.both(draws.rope(), draws.kinds),
    ),
    "gptj": Zoo({"gptj": "GPTJForCausalLM"}, draws.GPTJ),
    "granite": Zoo(
        {"granite": "GraniteForCausalLM"},
        draws.RMS
        | {
            "attention_bias": draws.BOOL,
            "mlp_bias": draws.BOOL,
            "embedding_multiplier": (1.0, 12.0),
            "attention_multiplier": (0.1, 0.5),
            "residual_multiplier": (0.22, 1.0),
            "logits_scaling": (1.0, 8.0),
        },
        draws.rope(),
    ),
    "granitemoe": Zoo({"granitemoe": "GraniteMoeForCausalLM"}, draws.GRANITE_MOE, draws.rope()),
    "granitemoehybrid": Zoo(
        {"granitemoehybrid": "GraniteMoeHybridForCausalLM"},
        draws.GRANITE_MOE
        | draws.MAMBA
        | {
            "num_local_experts": (0, 4, 8),
            "shared_intermediate_size": (24, 56),
            "position_embedding_type": (None, "nope", "rope", "rope"),
            "mamba_expand": (1, 2),
        },
        draws.both(draws.rope(), draws.mambas),
    ),
    "granitemoeshared": Zoo(
        {"granitemoeshared": "GraniteMoeSharedForCausalLM"},
        draws.GRANITE_MOE | {"shared_intermediate_size": (0, 24, 56)},
        draws.rope(),
    ),
    "helium": Zoo(
        {"helium": "HeliumForCausalLM"},
        draws.RMS
        | {"rms_norm_eps": (1e-8, 1e-3), "attention_bias": draws.BOOL, "mlp_bias": draws.BOOL},
        draws.both(draws.rope(), draws.helium_heads),
    ),
    "hunyuan_v1_dense": Zoo(
        {"hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM"},
        draws.RMS | {"head_dim": (8, 16), "attention_bias": draws.BOOL},
        lambda rng: draws.rope()(rng) if rng.random() < 0.5 else draws.alpha(rng),
    ),
    "internlm3": Zoo(
        {"internlm3": "InternLM3ForCausalLM"},
        draws.RMS | {"head_dim": (8, 16)},
        draws.both(draws.rope(), draws.internlm3_biases),
    ),
    "lfm2_moe": Zoo(
        {"lfm2_moe": "Lfm2MoeForCausalLM"},
        {name: values for name, values in draws.COMMON.items() if name != "hidden_act"}
        | {
            "norm_eps": draws.EPS,
            "head_dim": (8, 16),
            "conv_bias": draws.BOOL,
            "conv_L_cache": (2, 3, 4),
            "num_dense_layers": (0, 1, 2),
            "num_experts": (4, 8),
            "num_experts_per_tok": (1, 2, 4),
            "moe_intermediate_size": (24, 40),
            "use_expert_bias": draws.BOOL,
            "norm_topk_prob": draws.BOOL,
            "routed_scaling_factor": (1.0, 2.5),
        },
        draws.both(draws.rope(), draws.convs),
    ),
    "ministral": Zoo(
        {"ministral": "MinistralForCausalLM"},
        draws.RMS | {"head_dim": (8, 16), "sliding_window": (5, 16)},
        draws.both(draws.rope(), draws.kinds),
    ),
    "minimax_m2": Zoo(
        {"minimax_m2": "MiniMaxM2ForCausalLM"},
        draws.RMS
        | {
            "head_dim": (8, 16),
            "num_local_experts": (4, 8),
            "num_experts_per_tok": (1, 2, 4),
            "rotary_dim": (None, 4, 8),
        },
        draws.rope(),
    ),
    "ministral3": Zoo(
        {"ministral3": "Ministral3ForCausalLM"},
        draws.RMS | {"head_dim": (8, 16), "sliding_window": (None, 5, 16)},
        draws.ministral3_rope,
    ),
    "mixtral": Zoo(
        {"mixtral": "MixtralForCausalLM"},
        draws.RMS
        | {
            "head_dim": (8, 16),
            "num_local_experts": (4, 8),
            "num_experts_per_tok": (1, 2, 4),
            "sliding_window": (None, 5, 16),
        },
        draws.rope(),
    ),
    "nemotron": Zoo(
        {"nemotron": "NemotronForCausalLM"},
        draws.COMMON
        | {
            "norm_eps": draws.EPS,
            "attention_bias": draws.BOOL,
            "mlp_bias": draws.BOOL,
            "hidden_size": (32, 64),
        },
        draws.rope(partial=(0.5, 1.0)),
    ),
    "nemotron_h": Zoo(
        {"nemotron_h": "NemotronHForCausalLM"},
        {
            **{name: draws.COMMON[name] for name in draws.NEMOTRON_H_COMMON},
            "layer_norm_epsilon": draws.EPS,
            "head_dim": (8, 16),
            "mlp_hidden_act": draws.ACTIVATIONS,
            "mlp_bias": draws.BOOL,
            "mamba_num_heads": (4, 8),
            "mamba_head_dim": (8, 12),
            "ssm_state_size": (8, 24),
            "conv_kernel": (2, 3, 4),
            "chunk_size": (8, 128),
            "use_conv_bias": draws.BOOL,
            "use_bias": draws.BOOL,
            "time_step_min": (0.0,),
            "n_routed_experts": (8, 16),
            "num_experts_per_tok": (1, 2, 4),
            "moe_intermediate_size": (24, 40),
            "moe_shared_expert_intermediate_size": (24, 56),
            "moe_latent_size": (None, 16, 24),
            "norm_topk_prob": draws.BOOL,
            "routed_scaling_factor": (1.0, 2.5),
            "n_groups": (1, 2, 4),
        },
        draws.nemotron_h_layers,
    ),
    "olmo": Zoo(
        {"olmo": "OlmoForCausalLM"},
        draws.COMMON | {"attention_bias": draws.BOOL, "clip_qkv": (None, 0.5, 2.0)},
        draws.rope(),
    ),
    "olmo2": Zoo(
        {"olmo2": "Olmo2ForCausalLM"}, draws.RMS | {"attention_bias": draws.BOOL}, draws.rope()
    ),
    "olmo3": Zoo(
        {"olmo3": "Olmo3ForCausalLM"},
        draws.RMS | {"attention_bias": draws.BOOL, "sliding_window": (5, 16)},
        draws.both(draws.olmo3_rope, draws.kinds),
    ),
    "olmoe": Zoo(
        {"olmoe": "OlmoeForCausalLM"},
        {name: values for name, values in draws.RMS.items() if name != "tie_word_embeddings"}
        | {
            "attention_bias": draws.BOOL,
            "num_experts": (4, 8),
            "num_experts_per_tok": (1, 2, 4),
            "norm_topk_prob": draws.BOOL,
        },
        draws.rope(),
    ),
    "opt": Zoo(
        {"opt": "OPTForCausalLM"},
        {
            "hidden_size": (32, 48, 64),
            "ffn_dim": (40, 96),
            "num_hidden_layers": (1, 2, 4),
            "num_attention_heads": (4, 8),
            "max_position_embeddings": (draws.CONTEXT,),
            "tie_word_embeddings": draws.BOOL,
            "activation_function": draws.ACTIVATIONS,
            "do_layer_norm_before": draws.BOOL,
            "_remove_final_layer_norm": draws.BOOL,
            "word_embed_proj_dim": (None, 24, 64),
            "enable_bias": draws.BOOL,
        },
    ),
    "phi": Zoo(
        {"phi": "PhiForCausalLM"},
        draws.LAYER_NORM | {"hidden_size": (64,)},
        draws.rope(partial=(0.25, 0.5, 1.0)),
    ),
    "phi3": Zoo(
        {"phi3": "Phi3ForCausalLM"}, draws.RMS | {"sliding_window": (None, 5, 16)}, draws.phi3_rope
    ),
    "phimoe": Zoo(
        {"phimoe": "PhimoeForCausalLM"},
        draws.RMS
        | {
            "head_dim": (16,),
            "attention_bias": draws.BOOL,
            "lm_head_bias": draws.BOOL,
            "num_local_experts": (2, 4, 8),
            "router_jitter_noise": (0.0, 0.01, 0.2, 1.0),
            "sliding_window": (None, 5, 16),
        },
        draws.phimoe_rope,
    ),
    "qwen2_moe": Zoo(
        {"qwen2_moe": "Qwen2MoeForCausalLM"},
        draws.RMS
        | {
            "num_experts": (4, 8),
            "num_experts_per_tok": (1, 2, 4),
            "moe_intermediate_size": (24, 40),
            "shared_expert_intermediate_size": (24, 56),
            "norm_topk_prob": draws.BOOL,
            "qkv_bias": draws.BOOL,
            "mlp_only_layers": ([], [0]),
            "decoder_sparse_step": (1, 2),
        },
        draws.both(draws.rope(), draws.qwen_windows),
    ),
    "seed_oss": Zoo(
        {"seed_oss": "SeedOssForCausalLM"},
        draws.RMS
        | {
            "head_dim": (None, 8, 16),
            "attention_bias": draws.BOOL,
            "attention_out_bias": draws.BOOL,
            "mlp_bias": draws.BOOL,
        },
        draws.rope(),
    ),
    "smollm3": Zoo(
        {"smollm3": "SmolLM3ForCausalLM"},
        draws.RMS
        | {
            "attention_bias": draws.BOOL,
            "mlp_bias": draws.BOOL,
            "use_sliding_window": draws.BOOL,
            "sliding_window": (None, 5, 16),
        },
        draws.both(draws.rope(), draws.no_rope),
    ),
    "stablelm": Zoo(
        {"stablelm": "StableLmForCausalLM"},
        draws.LAYER_NORM
        | {"use_qkv_bias": draws.BOOL, "use_parallel_residual": draws.BOOL, "hidden_size": (64,)},
        draws.rope(partial=(0.25, 0.5, 1.0)),
    ),
    "starcoder2": Zoo(
        {"starcoder2": "Starcoder2ForCausalLM"},
        draws.COMMON
        | {"norm_epsilon": draws.EPS, "use_bias": draws.BOOL, "sliding_window": (None, 5, 16)},
        draws.rope(),
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
            config[name] = config[name][: config.get("num_hidden_layers")]
    return config
