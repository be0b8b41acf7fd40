"""Writes models as GGUF files with the package gguf, as llama.cpp's converter would."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import tokenizers
from gguf import GGMLQuantizationType as GgmlType

from enginebay.ops.rotary import rope_frequencies
from enginebay_models.checkpoint import find_tensors
from enginebay_models.rope_config import read_rope

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "SmolLM3ForCausalLM": "smollm3",
    "GraniteForCausalLM": "granite",
    "Olmo2ForCausalLM": "olmo2",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "ArceeForCausalLM": "arcee",
    "CohereForCausalLM": "command-r",
    "Cohere2ForCausalLM": "cohere2",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Exaone4ForCausalLM": "exaone4",
    "Glm4ForCausalLM": "glm4",
    "GPTNeoXForCausalLM": "gptneox",
    "HunYuanDenseV1ForCausalLM": "hunyuan-dense",
    "Ministral3ForCausalLM": "mistral3",
    "NemotronForCausalLM": "nemotron",
    "Olmo3ForCausalLM": "olmo2",
    "OlmoeForCausalLM": "olmoe",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "SeedOssForCausalLM": "seed_oss",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_COHERE = {"layer_norm_eps": 1e-4, "logit_scale": 0.25}
_SCALED_QUERIES = {"llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0}
MORE_FIELDS: dict[str, dict[str, Any]] = {
    "ArceeForCausalLM": {"hidden_act": "relu2", "attention_bias": True, "rope_scaling": _YARN},
    "Cohere2ForCausalLM": _COHERE | {"num_hidden_layers": 4},
    "CohereForCausalLM": _COHERE | {"attention_bias": True},
    "Exaone4ForCausalLM": {"sliding_window": None},
    "Gemma2ForCausalLM": {"attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0},
    "GemmaForCausalLM": {"hidden_act": "gelu_pytorch_tanh"},
    "Glm4ForCausalLM": {"partial_rotary_factor": 0.5, "attention_bias": True},
    "GraniteForCausalLM": {
        "attention_multiplier": 0.25,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 8.0,
    },
    "GPTNeoXForCausalLM": {
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-4,
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.25,
        "use_parallel_residual": False,
    },
    "HunYuanDenseV1ForCausalLM": {
        "head_dim": 4,
        "max_position_embeddings": 262144,
        "rope_scaling": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0},
    },
    "Ministral3ForCausalLM": {"sliding_window": None, "rope_scaling": _YARN | _SCALED_QUERIES},
    "NemotronForCausalLM": {
        "hidden_act": "relu2",
        "norm_eps": 1e-4,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    "Olmo3ForCausalLM": {"num_hidden_layers": 4, "rope_theta": 5e5, "rope_scaling": _YARN},
    "OlmoeForCausalLM": {"norm_topk_prob": False},
    "Phi3ForCausalLM": {
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 64,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0 + i / 32 for i in range(24)],
            "long_factor": [1.0 + i for i in range(24)],
            "attention_factor": 1.25,
            "original_max_position_embeddings": 64,
        },
    },
    "Qwen2MoeForCausalLM": {"norm_topk_prob": False, "shared_expert_intermediate_size": 128},
    "SmolLM3ForCausalLM": {"num_hidden_layers": 5},
    "StableLmForCausalLM": {
        "layer_norm_eps": 1e-4,
        "partial_rotary_factor": 0.25,
        "use_qkv_bias": True,
        "use_parallel_residual": False,
    },
    "Starcoder2ForCausalLM": {
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-4,
        "sliding_window": None,
    },
}
"""Class -> fields of config.json that tiny models of it have beside those of all tests."""
LAYER_NORM_EPS = {
    "cohere2": "layer_norm_eps",
    "command-r": "layer_norm_eps",
    "gptneox": "layer_norm_eps",
    "nemotron": "norm_eps",
    "stablelm": "layer_norm_eps",
    "starcoder2": "norm_epsilon",
}
"""Architecture -> the field of config.json that its LayerNorms have."""
WITHOUT_HEAD_SIZE = (
    *("cohere2", "command-r", "gptneox", "olmoe", "qwen2moe", "stablelm", "starcoder2"),
)
"""Architectures whose config.json has no head_dim."""
WITHOUT_ROTARY_SIZE = (
    *("command-r", "ernie4_5", "exaone4", "hunyuan-dense", "olmoe", "qwen2moe", "seed_oss"),
    "starcoder2",
)
PERMUTED = ("arcee", "granite", "llama", "mistral3", "smollm3")
"""Architectures whose queries and keys the converter permutes."""


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The vocabulary of a file: its type, tokens with types and scores, and other metadata."""

    model: str
    texts: list[str]
    types: list[int]
    scores: list[float] | None = None
    merges: list[str] | None = None
    pre: str | None = None
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def demo_tokens(folder: Path, pre: str = "smollm", **more: Any) -> Tokens:
    """The byte pairs of a folder's tokenizer.json."""
    stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    special = {one["id"]: one["content"] for one in stored["added_tokens"]}
    texts = {number: token for token, number in stored["model"]["vocab"].items()} | special
    merges = [one if isinstance(one, str) else " ".join(one) for one in stored["model"]["merges"]]
    return Tokens(
        "gpt2",
        [texts[number] for number in range(len(texts))],
        [3 if number in special else 1 for number in range(len(texts))],
        merges=merges,
        pre=pre,
        more={
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 0,
            "tokenizer.ggml.padding_token_id": 3,
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": settings["chat_template"],
            **more,
        },
    )


def letters(count: int) -> Tokens:
    """`count` tokens that are bytes or digits, for models whose texts do not matter."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    texts += [f"t{number}" for number in range(count - len(texts))]
    types = [2, 3, 3, *[6] * 256, *[1] * (count - 259)]
    return Tokens("llama", texts, types, scores=[-float(i) for i in range(count)])


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    tokens: Tokens,
    kind: str = "F32",
    kinds: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Write a file of tensors with the names that transformers has for them.

    Tensors of two dimensions are of type `kind`, or as `kinds` has it by their names in the file.
    Values of a K type are random blocks.
    """
    architecture = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, architecture)
    _add_config(writer, architecture, config)
    _add_tokens(writer, tokens)
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[architecture], config["num_hidden_layers"])
    for name, values in _with_stacked_experts(tensors, config).items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        changed = _as_stored(name, values.astype(np.float32), architecture, config)
        own = "F32" if changed.ndim == 1 else kinds.get(stored, kind)
        raw = None if own == "F32" else GgmlType[own]
        writer.add_tensor(stored, quantized_bytes(changed, own), raw_dtype=raw)
    if (config.get("rope_scaling") or {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _divisors(config))
    for length in ("long", "short"):
        divisors = (config.get("rope_scaling") or {}).get(f"{length}_factor")
        if divisors is not None:
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(divisors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def convert(folder: Path, path: Path, kind: str = "F32") -> Path:
    """Write a checkpoint with a tokenizer of byte pairs as a GGUF file."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = {name: one.view() for name, one in find_tensors(folder).items()}
    return write_gguf(path, config, tensors, demo_tokens(folder), kind)


def quantized_bytes(values: np.ndarray, kind: str) -> np.ndarray:
    """Return the bytes of values in a type; of the K types, whose quantisers the package does not
    have, blocks with random bits and scales like those of `values`.
    """
    if kind == "F32":
        return values
    if not kind.endswith("_K"):
        return np.asarray(gguf.quants.quantize(values, GgmlType[kind]))
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[GgmlType[kind]]
    rng = np.random.default_rng(values.size)
    *outputs, columns = values.shape
    rows = values.size // columns
    blocks = rng.integers(0, 256, (rows, columns // num_values, num_bytes), np.uint8)
    size = np.float16(values.std() / {"Q4_K": 500, "Q5_K": 900, "Q6_K": 1200}[kind])
    places = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]
    for number, at in enumerate(places):
        half = size * np.float16((1.0, 6.0)[number])
        blocks[..., at : at + 2] = np.full(1, half, np.float16).view(np.uint8)
    blocks[: rows // 8, :, places[0] : places[0] + 2] = 0  # constant groups
    return blocks.reshape(*outputs, -1)


def _add_config(writer: gguf.GGUFWriter, architecture: str, config: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    if architecture in LAYER_NORM_EPS:
        writer.add_layer_norm_eps(config[LAYER_NORM_EPS[architecture]])
    else:
        writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    if architecture not in WITHOUT_HEAD_SIZE:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if architecture not in WITHOUT_ROTARY_SIZE:
        writer.add_rope_dimension_count(int(head_dim * config.get("partial_rotary_factor", 1.0)))
    writer.add_vocab_size(config["vocab_size"])
    _add_experts(writer, architecture, config)
    _add_windows(writer, architecture, config)
    if architecture == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if architecture in ("cohere2", "command-r"):
        writer.add_logit_scale(config["logit_scale"])
    if architecture in ("gptneox", "stablelm"):
        writer.add_parallel_residual(config["use_parallel_residual"])
    _add_rotary(writer, architecture, config, head_dim)


def _add_experts(writer: gguf.GGUFWriter, architecture: str, config: Mapping[str, Any]) -> None:
    if architecture in ("olmoe", "qwen2moe", "qwen3moe"):
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    width = config.get("moe_intermediate_size")
    if width is not None and architecture in ("qwen2moe", "qwen3moe"):
        writer.add_expert_feed_forward_length(width)
    width = config.get("shared_expert_intermediate_size")
    if width is not None and architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(width)


def _add_windows(writer: gguf.GGUFWriter, architecture: str, config: Mapping[str, Any]) -> None:
    if architecture in ("cohere2", "gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config["sliding_window"])
    is_olmo3 = config["architectures"][0] == "Olmo3ForCausalLM"
    if is_olmo3 or (architecture == "exaone4" and config["sliding_window"] is not None):
        writer.add_sliding_window(config["sliding_window"])
        kinds = config.get("layer_types") or (["sliding_attention"] * 3 + ["full_attention"]) * 9
        count = config["num_hidden_layers"]
        writer.add_sliding_window_pattern([one == "sliding_attention" for one in kinds[:count]])


def _add_rotary(
    writer: gguf.GGUFWriter, architecture: str, config: Mapping[str, Any], head_dim: int
) -> None:
    rule = config.get("rope_scaling")
    theta = config.get("rope_theta", 10000.0)
    if rule and rule["rope_type"] == "dynamic":  # of HunYuan
        theta *= rule["alpha"] ** (head_dim / (head_dim - 2))
        writer.add_rope_scaling_factor(1)
        writer.add_rope_scaling_orig_ctx_len(262144)
        writer.add_context_length(262144)
    if architecture not in ("gptneox", "stablelm"):
        writer.add_rope_freq_base(theta)
    if architecture in ("cohere2", "command-r", "nemotron") or (rule and "alpha" in rule):
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if rule and "llama_4_scaling_beta" in rule:
        writer.add_rope_scaling_yarn_log_mul(rule["mscale_all_dim"])
        writer.add_attn_temperature_scale(rule["llama_4_scaling_beta"])
    if rule and rule["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rule["rope_type"]))
        writer.add_rope_scaling_factor(rule["factor"])
    if rule and rule["rope_type"] in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rule["original_max_position_embeddings"])
    if rule and rule["rope_type"] == "longrope":
        writer.add_rope_scaling_attn_factors(rule["attention_factor"])


def _with_stacked_experts(
    tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Return tensors where one has the weights of all experts of a layer."""
    made = {name: one for name, one in tensors.items() if ".experts." not in name}
    for layer in range(config["num_hidden_layers"] if len(made) < len(tensors) else 0):
        for kind in ("gate", "up", "down"):
            prefix = f"model.layers.{layer}.mlp.experts"
            made[f"{prefix}.{kind}_proj.weight"] = np.stack(
                [
                    tensors[f"{prefix}.{number}.{kind}_proj.weight"]
                    for number in range(config["num_experts"])
                ]
            )
    return made


def _divisors(config: Mapping[str, Any]) -> np.ndarray:
    """Return what the rule of Llama 3 divides each rotary frequency by."""
    plain = {name: value for name, value in config.items() if name != "rope_scaling"}
    (before, _), (after, _) = (
        rope_frequencies(read_rope(one).spec(config["head_dim"])) for one in (plain, config)
    )
    return (np.asarray(before) / np.asarray(after)).astype(np.float32)


def _add_tokens(writer: gguf.GGUFWriter, tokens: Tokens) -> None:
    writer.add_tokenizer_model(tokens.model)
    if tokens.pre is not None:
        writer.add_tokenizer_pre(tokens.pre)
    writer.add_token_list(tokens.texts)
    writer.add_token_types(tokens.types)
    if tokens.scores is not None:
        writer.add_token_scores(tokens.scores)
    if tokens.merges is not None:
        writer.add_token_merges(tokens.merges)
    for key, value in tokens.more.items():
        add = {
            bool: writer.add_bool,
            float: writer.add_float32,
            int: writer.add_uint32,
            str: writer.add_string,
        }
        add[type(value)](key, value)


def _as_stored(
    name: str, values: np.ndarray, architecture: str, config: Mapping[str, Any]
) -> np.ndarray:
    """Return values as files have them: rotary pairs of llama beside each other, norms of Gemma
    and Nemotron with 1 added. Some converters store the gate of shared experts as a vector, others
    as a matrix of one row: here the first layer has a vector. Of GPT-NeoX, all queries come before
    all keys, and these before all values.
    """
    if architecture.startswith(("gemma", "nemotron")) and name.endswith("norm.weight"):
        return values + 1
    if name == "model.layers.0.mlp.shared_expert_gate.weight":
        return values[0]
    if "query_key_value" in name:
        parts = values.reshape(config["num_attention_heads"], 3, -1, *values.shape[1:])
        return np.concatenate([parts[:, i].reshape(-1, *values.shape[1:]) for i in range(3)])
    found = re.search(r"\.([qk])_proj\.", name)
    if architecture not in PERMUTED or found is None:
        return values
    heads = config["num_attention_heads"]
    count = heads if found[1] == "q" else config.get("num_key_value_heads", heads)
    halves = values.reshape(count, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def learnt_tokens(texts: list[str], count: int = 800, **more: Any) -> Tokens:
    """A vocabulary with scores, as SentencePiece learns one from texts: special tokens, bytes,
    merged pieces by rank, and letters.
    """
    learner = tokenizers.Tokenizer(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=count, show_progress=False)
    learner.train_from_iterator((text.replace(" ", "▁") for text in texts), trainer)
    stored = json.loads(learner.to_str())["model"]
    merged = ["".join(pair) for pair in stored["merges"]]
    pieces = [*dict.fromkeys(merged), *(one for one in stored["vocab"] if one not in merged)]
    special = ["<unk>", "<s>", "</s>"]
    octets = [f"<0x{byte:02X}>" for byte in range(256)]
    own = ["<start_of_turn>", "<end_of_turn>", "\n\n", "\n\n\n", "  ", "    "]
    pieces = [one for one in pieces if one not in {*special, *octets, *own}]
    return Tokens(
        "llama",
        [*special, *octets, *own, *pieces],
        [2, 3, 3, *[6] * 256, 3, 3, *[4] * 4, *[1] * len(pieces)],
        scores=[*[0.0] * (3 + 256 + len(own)), *(-float(rank) for rank in range(len(pieces)))],
        more=more,
    )
