"""Small checkpoints that tests write and load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from enginebay.contracts.model import Model
from enginebay_models.checkpoint import SINGLE_FILE
from enginebay_models.llama import family
from enginebay_testing.model_harness import random_tensor

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
Tensors = dict[str, np.ndarray]


def model_of(**fields: Any) -> Model:
    return family.build(CONFIG | fields, dtype="float32")


def random_tensors(model: Model) -> Tensors:
    sources = model.tensor_sources().values()
    pairs = [pair for source in sources for pair in zip(source.names, source.shapes, strict=True)]
    return {name: random_tensor(name, shape, 1) for name, shape in pairs}


def write(folder: Path, tensors: Tensors, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | fields))
    save_file(tensors, folder / SINGLE_FILE)
    return folder
