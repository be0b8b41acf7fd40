"""Random checkpoints of three sizes, written with NumPy: the same folder for every contestant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from enginebay_models import llama, qwen3

_COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "head_dim": 64,
}
SIZES: dict[str, dict[str, Any]] = {
    "S": {
        "vocab_size": 4096,
        "hidden_size": 384,
        "intermediate_size": 1280,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    "M": {
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
    "L": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
}
"""S has 14 million parameters, M 125 million, L 600 million."""
FAMILIES = {"llama": llama.family, "qwen3": qwen3.family}

SEED = 22


def write_model(folder: Path, size: str, dtype: str) -> Path:
    """The checkpoint of a size, made once; its f32 weights were rounded to bf16 first, so that both
    dtypes hold the same.
    """
    path = folder / f"{size}-{dtype}"
    if (path / "tokenizer.json").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    config = _COMMON | SIZES[size] | {"dtype": dtype}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rng = np.random.default_rng(SEED)
    tensors = {}
    family = FAMILIES[config["model_type"]]
    for source in family.build(config, dtype="float32").tensor_sources().values():
        for name, shape in zip(source.names, source.shapes, strict=True):
            values = (
                np.ones(shape, np.float32)
                if len(shape) == 1
                else rng.standard_normal(shape, np.float32) * 0.05
            )
            tensors[name] = values.astype(ml_dtypes.bfloat16).astype(
                ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
            )
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(path, config["vocab_size"])
    return path


def _write_tokenizer(path: Path, vocab_size: int) -> None:
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
    } | empty
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8"
    )
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
