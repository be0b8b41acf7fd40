"""Random LoRA adapters for the tests, and checkpoints whose weights an adapter is merged into."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


EMBEDDING, HEAD = "embed_tokens", "lm_head"


def base_tensors(model: str | Path) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint, in f32."""
    tensors = load_file(Path(model) / "model.safetensors")
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def write_adapter(
    folder: Path,
    model: str | Path,
    *,
    seed: int = 0,
    rank: int = 4,
    targets: Sequence[str] = TARGETS,
    scale: float = 0.5,
    dtype: Any = np.float32,
    **fields: Any,
) -> Path:
    """Write a random adapter for all layers of a checkpoint; `fields` of its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, tensors = np.random.default_rng(seed), {}
    for name, weight in sorted(base_tensors(model).items()):
        module = name.removesuffix(".weight")
        leaf = module.rpartition(".")[2]
        if leaf in targets:
            outputs, inputs = weight.shape[:: -1 if leaf == EMBEDDING else 1]
            for kind, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                width = outputs if leaf == EMBEDDING else shape[1]
                values = (rng.normal(size=shape) * scale / np.sqrt(width)).astype(dtype)
                name = f"embedding_{kind}" if leaf == EMBEDDING else f"{kind}.weight"
                tensors[f"base_model.model.{module}.lora_{name}"] = values
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    config |= {"target_modules": list(targets), **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def change_config(folder: Path, **fields: Any) -> Path:
    """Change fields of an adapter's configuration."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def change_tensors(folder: Path, changes: Mapping[str, np.ndarray | None]) -> Path:
    """Replace, add or (None) remove tensors of an adapter."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path) | changes
    save_file({name: one for name, one in tensors.items() if one is not None}, path)
    return folder


def write_merged(folder: Path, model: str | Path, adapter: Path) -> Path:
    """Write a checkpoint with the products of an adapter added to its weights."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((adapter / "adapter_config.json").read_text())
    rank = config["r"]
    factor = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    tensors, products = base_tensors(model), load_file(adapter / "adapter_model.safetensors")
    for name in tensors:
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        kinds = [f"{prefix}.lora_{kind}.weight" for kind in "AB"]
        if name.endswith(f"{EMBEDDING}.weight"):
            kinds = [f"{prefix}.lora_embedding_{kind}" for kind in "AB"]
        if kinds[0] in products:
            a, b = (products[kind].astype(np.float64) for kind in kinds)
            added = (b @ a).T if name.endswith(f"{EMBEDDING}.weight") else b @ a
            tensors[name] = (tensors[name] + factor * added).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
