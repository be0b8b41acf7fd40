"""Writes random checkpoints with the shapes of real models quickly, and computes the bytes that a
step must read.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

Config = dict[str, Any]

MODELS: dict[str, Config] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
}
_COMMON: Config = {
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_TINY: Config = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
BLOCK = 1 << 20
"""Number of different random values; larger tensors repeat them, because drawing 8 billion takes
minutes.
"""

SHARD_BYTES = 2 << 30


def config(model: str, *, tiny: bool) -> Config:
    """Return the config.json of a model, or of a small model of its family."""
    return _COMMON | MODELS[model] | (_TINY if tiny else {})


def tensors(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the checkpoint's tensors by their Hugging Face names."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    width = config["head_dim"]
    q, kv = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for name, shape in {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            found[f"{layer}.{name}.weight"] = shape
        if config["model_type"] == "qwen3":
            found |= {f"{layer}.self_attn.{name}_norm.weight": (width,) for name in "qk"}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (vocab, hidden)
    return found


def weight_bytes(config: Config, dtype: str) -> int:
    """Return the weight bytes that a decode step reads: all weights, without the embedding where it
    is not the head too, because a step reads few of its rows.
    """
    sizes = {name: int(np.prod(shape)) for name, shape in tensors(config).items()}
    read = sum(sizes.values()) - (
        0 if config["tie_word_embeddings"] else sizes["model.embed_tokens.weight"]
    )
    return read * (4 if dtype == "float32" else 2)


def kv_bytes(config: Config, dtype: str) -> int:
    """Return the bytes of keys and values of one position in all layers."""
    heads = config["num_hidden_layers"] * config["num_key_value_heads"]
    return 2 * heads * config["head_dim"] * (4 if dtype == "float32" else 2)


def write(folder: Path, config: Config, dtype: str) -> Path:
    """Write the checkpoint to a folder, unless it exists. The folder gets its name when it is
    complete.
    """
    if (folder / "tokenizer.json").exists():
        return folder
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # left by an interrupted run
    part.mkdir(parents=True)
    _write_all(part, config, dtype)
    return part.rename(folder)


def _write_all(folder: Path, config: Config, dtype: str) -> None:
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}), encoding="utf-8")
    kind = np.dtype(np.float32) if dtype == "float32" else np.dtype(ml_dtypes.bfloat16)
    values = (np.random.default_rng(0).standard_normal(BLOCK, np.float32) * 0.02).astype(kind)
    shard: dict[str, np.ndarray] = {}
    where: dict[str, str] = {}
    number = 0
    for name, shape in tensors(config).items():
        shard[name] = np.ones(shape, kind) if len(shape) == 1 else np.resize(values, shape)
        where[name] = f"model-{number}.safetensors"
        if sum(array.nbytes for array in shard.values()) >= SHARD_BYTES:
            save_file(shard, folder / where[name], metadata={"format": "pt"})
            shard, number = {}, number + 1
    if shard:
        save_file(shard, folder / f"model-{number}.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    _write_tokenizer(folder, config["vocab_size"])


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    model = {
        "type": "WordLevel",
        "vocab": {f"w{i}": i for i in range(vocab_size)},
        "unk_token": "w0",
    }
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": model,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8"
    )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | empty), encoding="utf-8")
