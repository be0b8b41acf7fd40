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
}


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
    names = gguf.get_tensor_name_map(
        getattr(gguf.MODEL_ARCH, architecture.upper()), config["num_hidden_layers"]
    )
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
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * config.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    writer.add_vocab_size(config["vocab_size"])
    if architecture == "qwen3moe":
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if architecture in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    rule = config.get("rope_scaling")
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
    with 1 added.
    """
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return values + 1
    found = re.search(r"\.([qk])_proj\.", name)
    if architecture not in ("granite", "llama", "smollm3") or found is None:
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
