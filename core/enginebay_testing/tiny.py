"""A tiny random checkpoint for suites that need a whole model: two layers, which
compile quickly.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from enginebay.compose.composition import find_family
from enginebay.plugins.registry import Registry
from enginebay_testing.model_harness import random_tensor
from enginebay_testing.models import tiny_config

ARCHITECTURE = "LlamaForCausalLM"


def write_tiny_checkpoint(
    folder: Path, registry: Registry, architecture: str = ARCHITECTURE, **fields: Any
) -> Path:
    """Write config, weights and a tokenizer with one word per id into `folder`, using the plugin
    that serves the architecture. `fields` override the usual fields of config.json.
    """
    family = find_family(registry, architecture)
    config = tiny_config(family) | {"architectures": [architecture], "model_type": "llama"} | fields
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {
        name: random_tensor(name, shape, seed=1)
        for source in family.build(config, dtype="float32").tensor_sources().values()
        for name, shape in zip(source.names, source.shapes, strict=True)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_word_tokenizer(folder, config["vocab_size"])
    return folder


def write_word_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer with the vocabulary w0, w1, ..., separated by spaces."""
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    tokenizer = nothing | {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {
            "type": "WordLevel",
            "vocab": {f"w{i}": i for i in range(vocab_size)},
            "unk_token": "w0",
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
