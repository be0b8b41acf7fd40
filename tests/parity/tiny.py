"""Tiny random checkpoints of every family: the same folder for transformers and for us, and prompts
to try them with.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from enginebay.contracts.model import ModelFamily
from enginebay_testing.model_harness import random_tensor

SEED = 20
VOCAB_SIZE = 128
PROMPT_LENGTHS = (1, 2, 7, 33, 150, 300)
NUM_NEW_TOKENS = 64
GOLDENS = Path(__file__).parent / "goldens"

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
_MHA = {"num_key_value_heads": 4}

# Old and new spellings of the rope fields take turns: both must be read.
_LLAMA: dict[str, dict[str, Any]] = {
    "llama-mha": _MHA | {"rope_theta": 10000.0, "rope_scaling": None},
    "llama-tied": {
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "llama-rope-llama3": {"rope_parameters": _LLAMA3},
    "llama-rope-linear": {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama-rope-yarn": {"rope_theta": 10000.0, "rope_scaling": _YARN},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
}
_MISTRAL: dict[str, dict[str, Any]] = {
    "mistral-window": {"sliding_window": 16, "head_dim": 24},
    "mistral-full": {"sliding_window": None},
}
_QWEN2: dict[str, dict[str, Any]] = {
    "qwen2-tied": {"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 16},
    "qwen2-some-windows": {
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
    },
}
_QWEN3: dict[str, dict[str, Any]] = {
    "qwen3-tied": {"tie_word_embeddings": True, "head_dim": 24},
    "qwen3-yarn-biases": {
        "head_dim": 16,
        "attention_bias": True,
        "rope_parameters": _YARN | {"rope_theta": 1e6, "truncate": False},
    },
}
_GEMMA3: dict[str, dict[str, Any]] = {
    "gemma3-mixed": {
        "model_type": "gemma3_text",
        "head_dim": 24,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 20,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": 1000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "tie_word_embeddings": True,
    },
    "gemma3-untied": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
        },
        "attention_bias": True,
        "final_logit_softcapping": 4.0,
    },
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_QWEN3_MOE: dict[str, dict[str, Any]] = {
    "qwen3_moe-normed": _EXPERTS | {"norm_topk_prob": True, "head_dim": 24},
    "qwen3_moe-some-plain": _EXPERTS
    | {"num_experts_per_tok": 3, "mlp_only_layers": [0], "decoder_sparse_step": 1},
}
_LATENT = _MHA | {
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
}
_DEEPSEEK_V2: dict[str, dict[str, Any]] = {
    "deepseek_v2-grouped": _LATENT
    | {
        "q_lora_rank": 28,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "rope_scaling": _YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
    },
    "deepseek_v2-plain-queries": _LATENT
    | {"q_lora_rank": None, "topk_method": "greedy", "attention_bias": True},
}
_LFM2: dict[str, dict[str, Any]] = {
    "lfm2-mixed": {
        "layer_types": ["conv", "full_attention", "conv"],
        "norm_eps": 1e-5,
        "block_multiple_of": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
        "tie_word_embeddings": True,
    },
    "lfm2-biases": {
        "full_attn_idxs": [2],
        "conv_bias": True,
        "conv_L_cache": 4,
        "norm_eps": 1e-5,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 3,
    },
}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_state": 24, "mamba_chunk_size": 16}
_MPT: dict[str, dict[str, Any]] = {
    "mpt-clipped": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 512,
        "attn_config": {"clip_qkv": 0.8, "softmax_scale": 0.3},
        "tie_word_embeddings": True,
    },
    "mpt-six-heads": {
        "hidden_size": 72,
        "num_attention_heads": 6,
        "d_model": 72,
        "n_heads": 6,
        "n_layers": 3,
        "max_seq_len": 512,
    },
}
_GPT2: dict[str, dict[str, Any]] = {
    "gpt2-plain": {
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 3,
        "n_positions": 512,
        "tie_word_embeddings": True,
    },
    "gpt2-unscaled": {
        "n_embd": 72,
        "hidden_size": 72,
        "num_attention_heads": 6,
        "n_head": 6,
        "n_layer": 3,
        "n_positions": 512,
        "n_inner": 100,
        "activation_function": "relu",
        "layer_norm_epsilon": 1e-3,
        "scale_attn_weights": False,
    },
}
_SIX = {"hidden_size": 72, "num_attention_heads": 6}
_ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
_KINDS = ["sliding_attention", "full_attention"]
_ONE_EACH: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("ApertusForCausalLM", {"hidden_act": "xielu", "attention_bias": True}),
    "arcee": (
        "ArceeForCausalLM",
        {"hidden_act": "relu2", "mlp_bias": True, "rope_scaling": _YARN},
    ),
    "bloom": ("BloomForCausalLM", {"n_head": 6, "n_layer": 2, "seq_length": 512} | _SIX),
    "codegen": (
        "CodeGenForCausalLM",
        {"n_embd": 64, "n_head": 8, "n_layer": 2, "n_positions": 512, "rotary_dim": 4}
        | {"num_attention_heads": 8},
    ),
    "cohere": ("CohereForCausalLM", {"logit_scale": 2.0, "attention_bias": True}),
    "cohere2": (
        "Cohere2ForCausalLM",
        {"logit_scale": 2.0, "sliding_window": 16, "layer_types": _KINDS},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        _LATENT | _ROUTED | {"q_lora_rank": 28, "n_shared_experts": 1, "attention_bias": True},
    ),
    "dots1": (
        "Dots1ForCausalLM",
        _ROUTED | {"n_shared_experts": 2, "sliding_window": 16, "max_window_layers": 1},
    ),
    "ernie4_5": ("Ernie4_5ForCausalLM", {"use_bias": True, "head_dim": 24}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeForCausalLM",
        {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 40, "use_bias": True},
    ),
    "exaone4": (
        "Exaone4ForCausalLM",
        {"head_dim": 24, "sliding_window": 16, "sliding_window_pattern": 2},
    ),
    "falcon": ("FalconForCausalLM", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gemma": ("GemmaForCausalLM", {"head_dim": 24, "hidden_act": "gelu"}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            "head_dim": 24,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 20,
            "sliding_window": 16,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 4.0,
        },
    ),
    "glm4": (
        "Glm4ForCausalLM",
        {"head_dim": 16, "attention_bias": True, "partial_rotary_factor": 0.5},
    ),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        _ROUTED | {"head_dim": 16, "use_qk_norm": True, "attention_bias": True},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteForCausalLM",
        _LATENT | _ROUTED | {"q_lora_rank": 28, "n_shared_experts": 1, "rope_interleave": False},
    ),
    "gpt_bigcode": (
        "GPTBigCodeForCausalLM",
        {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512},
    ),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {"num_heads": 4, "num_layers": 2, "window_size": 16}
        | {"attention_types": [[["global", "local"], 1]]},
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        {"num_key_value_heads": 4, "rotary_pct": 0.5, "rotary_emb_base": 500.0},
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 16}
        | {"swiglu_limit": 0.8},
    ),
    "gptj": (
        "GPTJForCausalLM",
        {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512, "rotary_dim": 8},
    ),
    "falcon_h1": (
        "FalconH1ForCausalLM",
        _MAMBA
        | {
            "mamba_d_ssm": 64,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "key_multiplier": 0.5,
            "ssm_in_multiplier": 1.25,
            "ssm_multipliers": [0.5, 1.25, 0.75, 1.5, 0.25],
            "mlp_multipliers": [0.8, 0.6],
            "attention_out_multiplier": 0.9,
            "projectors_bias": True,
        },
    ),
    "granite": (
        "GraniteForCausalLM",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
        },
    ),
    "granitemoe": (
        "GraniteMoeForCausalLM",
        {"attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.0},
    ),
    "granitemoeshared": (
        "GraniteMoeSharedForCausalLM",
        {"shared_intermediate_size": 56, "residual_multiplier": 0.4, "attention_bias": True},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        _MAMBA
        | {
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 56,
            "mamba_n_groups": 2,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
        },
    ),
    "helium": ("HeliumForCausalLM", {"head_dim": 16, "attention_bias": True}),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1ForCausalLM",
        {"head_dim": 24, "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    ),
    "internlm3": (
        "InternLM3ForCausalLM",
        {"head_dim": 24, "qkv_bias": True, "bias": True},
    ),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM",
        {
            "layer_types": ["conv", "full_attention"],
            "norm_eps": 1e-4,
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
        },
    ),
    "ministral": (
        "MinistralForCausalLM",
        {"head_dim": 24, "sliding_window": 16, "layer_types": _KINDS},
    ),
    "minimax_m2": (
        "MiniMaxM2ForCausalLM",
        {"head_dim": 24, "rotary_dim": 12, "num_local_experts": 8, "num_experts_per_tok": 3},
    ),
    "ministral3": (
        "Ministral3ForCausalLM",
        {
            "head_dim": 24,
            "rope_parameters": _YARN | {"rope_theta": 1e4, "llama_4_scaling_beta": 0.5},
        },
    ),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 8, "sliding_window": 16}),
    "nemotron": ("NemotronForCausalLM", {"hidden_act": "relu2", "norm_eps": 1e-4}),
    "nemotron_h": (
        "NemotronHForCausalLM",
        {
            "num_hidden_layers": 6,
            "layers_block_type": [
                *("linear_attention", "moe", "linear_attention", "full_attention"),
                *("mlp", "moe"),
            ],
            "head_dim": 24,
            "layer_norm_epsilon": 1e-5,
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 12,
            "n_groups": 2,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 56,
            "moe_latent_size": 32,
            "routed_scaling_factor": 2.5,
            "time_step_min": 0.0,
            "mlp_bias": True,
            "use_bias": True,
        },
    ),
    "olmo": ("OlmoForCausalLM", {"clip_qkv": 0.8, "attention_bias": True}),
    "olmo2": ("Olmo2ForCausalLM", {"rope_theta": 5e5}),
    "olmo3": (
        "Olmo3ForCausalLM",
        {"sliding_window": 16, "layer_types": _KINDS, "rope_scaling": _YARN},
    ),
    "olmoe": ("OlmoeForCausalLM", {"num_experts": 8, "num_experts_per_tok": 2}),
    "opt": (
        "OPTForCausalLM",
        {"ffn_dim": 96, "do_layer_norm_before": False, "word_embed_proj_dim": 40},
    ),
    "phi": ("PhiForCausalLM", {"partial_rotary_factor": 0.25}),
    "phi3": (
        "Phi3ForCausalLM",
        {
            "sliding_window": 200,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 512,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.1],
                "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 8.0],
            },
        },
    ),
    "phimoe": (
        "PhimoeForCausalLM",
        {
            "attention_bias": True,
            "lm_head_bias": True,
            "num_local_experts": 8,
            "router_jitter_noise": 0.1,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.1, 2.6, 3.2],
                "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 9.0],
                "short_mscale": 1.2,
                "long_mscale": 1.4,
                "original_max_position_embeddings": 512,
            },
        },
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        _EXPERTS | {"shared_expert_intermediate_size": 56, "use_sliding_window": True},
    ),
    "seed_oss": ("SeedOssForCausalLM", {"head_dim": 24, "attention_out_bias": True}),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0], "mlp_bias": True}),
    "stablelm": (
        "StableLmForCausalLM",
        {"use_qkv_bias": True, "use_parallel_residual": True, "partial_rotary_factor": 0.5},
    ),
    "starcoder2": ("Starcoder2ForCausalLM", {"sliding_window": 16, "hidden_act": "gelu"}),
}
"""Families with one configuration here; family_zoo.py draws more."""
RARELY = tuple(f"{family}-one" for family in _ONE_EACH)
"""Variants of which tests compare one prompt."""
EIGHTHS = ("falcon_h1-one", "granitemoehybrid-one", "internlm3-one", "nemotron_h-one")
"""Variants of which every eighth logit is stored, as all goldens together must be small."""
QUICK = ("cohere-one", "gpt_neox-one", "olmo2-one", "phi3-one")
"""Those of `make test`: each has parts of the shared blocks that the others lack."""
_FAMILIES = {
    "deepseek_v2": ("DeepseekV2ForCausalLM", _DEEPSEEK_V2),
    "gemma3": ("Gemma3ForCausalLM", _GEMMA3),
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "lfm2": ("Lfm2ForCausalLM", _LFM2),
    "llama": ("LlamaForCausalLM", _LLAMA),
    "mistral": ("MistralForCausalLM", _MISTRAL),
    "mpt": ("MptForCausalLM", _MPT),
    "qwen2": ("Qwen2ForCausalLM", _QWEN2),
    "qwen3": ("Qwen3ForCausalLM", _QWEN3),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _QWEN3_MOE),
} | {
    family: (architecture, {f"{family}-one": {"num_hidden_layers": 2} | own})
    for family, (architecture, own) in _ONE_EACH.items()
}
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS: dict[str, dict[str, Any]] = {
    variant: _COMMON | {"model_type": model_type, "architectures": [architecture]} | own
    for model_type, (architecture, variants) in _FAMILIES.items()
    for variant, own in variants.items()
}
"""config.json by variant. A variant's name begins with its family's."""


def family_of(variant: str) -> ModelFamily:
    """The family of a variant."""
    family: ModelFamily = importlib.import_module(
        f"enginebay_models.{variant.partition('-')[0]}"
    ).family
    return family


def tensors_of(family: ModelFamily, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Random checkpoint tensors f32 by name; each depends on its name and SEED alone."""
    model = family.build(config, dtype="float32")
    return {
        name: random_tensor(name, shape, SEED)
        for source in model.tensor_sources().values()
        for name, shape in zip(source.names, source.shapes, strict=True)
    }


def write_checkpoint(folder: Path, variant: str) -> Path:
    """A checkpoint folder that transformers and enginebay can load, with a tokenizer of one word
    per id.
    """
    write_weights(folder, family_of(variant), CONFIGS[variant])
    write_tokenizer(folder)
    return folder


def write_weights(folder: Path, family: ModelFamily, config: Mapping[str, Any]) -> Path:
    """A checkpoint folder without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = tensors_of(family, config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_tokenizer(folder: Path) -> None:
    """A tokenizer with the vocabulary w0, w1, ..., separated by spaces."""
    vocab = {f"w{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def prompts() -> list[list[int]]:
    """Random prompts of PROMPT_LENGTHS tokens."""
    rng = np.random.default_rng(SEED)
    return [[int(i) for i in rng.integers(0, VOCAB_SIZE, length)] for length in PROMPT_LENGTHS]


def golden_positions(prompt_length: int) -> list[int]:
    """The positions of prompt and continuation whose logits are stored: some of the prompt, its
    last, the very last.
    """
    return [*range(0, prompt_length - 1, 32), prompt_length - 1, prompt_length + NUM_NEW_TOKENS - 1]


def stored_part(variant: str, logits: np.ndarray) -> np.ndarray:
    """Those of the logits [positions, vocab] that are stored."""
    return logits[:, ::8] if variant in EIGHTHS else logits


def read_golden(variant: str) -> tuple[list[list[int]], list[np.ndarray]]:
    """Of each prompt: the greedy tokens of transformers in f32, and its logits [golden_positions,
    vocab], of EIGHTHS every eighth.
    """
    with np.load(GOLDENS / f"{variant}.npz") as stored:
        token_ids = [[int(i) for i in row] for row in stored["token_ids"]]
        counts = [len(golden_positions(length)) for length in PROMPT_LENGTHS]
        parts = stored["mantissas"], stored["exponents"][:, None]
        logits = np.concatenate(parts, axis=1).view(np.float32).reshape(sum(counts), -1)
        return token_ids, np.split(logits, np.cumsum(counts)[:-1])


def write_golden(variant: str, token_ids: Sequence[Sequence[int]], logits: np.ndarray) -> None:
    """Store what `read_golden` returns, of all logits. The bytes with signs and exponents are an
    array of their own, as they can be compressed.
    """
    part = np.ascontiguousarray(stored_part(variant, logits), np.float32)
    numbers = part.view(np.uint8).reshape(-1, 4)
    np.savez_compressed(
        GOLDENS / f"{variant}.npz",
        token_ids=np.asarray(token_ids, np.int16),
        mantissas=numbers[:, :3],
        exponents=numbers[:, 3],
    )
