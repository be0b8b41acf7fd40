"""Reads adapters as PEFT writes them: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from enginebay.errors import CheckpointError, InputError, shown
from enginebay.nesting import parse_json
from enginebay_lora.layers import LayerPart
from enginebay_models.safetensors_file import StoredTensor, read_file

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_NAME = re.compile(r"(.+)\.lora_([AB])\.weight")

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "modules_to_save": (None, [], ()),
    "use_dora": (None, False),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "trainable_token_indices": (None, [], {}),
    "megatron_config": (None,),
    "layer_replication": (None, []),
}
"""Fields that change the model in a way that slots cannot hold, with the values that do not."""


def read_adapter(
    folder: str | Path, parts: Mapping[str, LayerPart], max_rank: int, dtype: np.dtype
) -> dict[str, np.ndarray]:
    """Return the adapter weights of one slot by path, [rank, ...] in `dtype`. The factor
    lora_alpha / r (rsLoRA: lora_alpha / sqrt(r)) is part of the weights b.

    parts: the layers of the model that may have adapters, by their names in the checkpoint.
    CheckpointError, which names the field or the tensor, for an adapter that cannot be used.
    """
    folder = Path(folder)
    config = _read_config(folder)
    rank, factor = _rank(config, max_rank)
    pairs = _pairs(folder, parts)
    arrays: dict[str, np.ndarray] = {}
    for module, pair in pairs.items():
        part = parts[module]
        outputs, inputs = part.shape
        for kind, allowed in (("A", (rank, inputs)), ("B", (outputs, rank))):
            if kind not in pair:
                raise _wrong(f"layer {shown(module)} has no tensor lora_{kind}", "both tensors")
            if pair[kind].shape != allowed:
                given = f"tensor {shown(pair[kind].name)} has shape {list(pair[kind].shape)}"
                raise _wrong(given, f"{list(allowed)}, for rank {rank} and this model")
        a = pair["A"].view().astype(np.float32)
        b = pair["B"].view().astype(np.float32) * np.float32(factor)
        with np.errstate(over="ignore", invalid="ignore"):
            made = {path: array.astype(dtype) for path, array in part.arrays(a, b).items()}
        if not all(np.isfinite(array.astype(np.float32)).all() for array in made.values()):
            raise _wrong(f"layer {shown(module)} holds NaN or infinity", f"finite {dtype} weights")
        arrays |= made
    return arrays


def _wrong(given: str, allowed: str, todo: str = "") -> CheckpointError:
    usual = "Pass an adapter that was trained for this model, or fetch its files again."
    return CheckpointError(f"the adapter cannot be used: {given}", allowed, todo or usual)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        text = (folder / CONFIG).read_bytes()
    except OSError as error:
        raise _wrong(
            f"{folder / CONFIG} cannot be read ({error.strerror})",
            f"a folder with {CONFIG} and {TENSORS}",
            "Pass the folder that PEFT's save_pretrained() has written.",
        ) from None
    try:
        config = parse_json(text)
    except (InputError, UnicodeDecodeError):
        config = None
    if not isinstance(config, dict):
        raise _wrong(f"{folder / CONFIG} is not a JSON object", "a configuration of PEFT")
    if config.get("peft_type") != "LORA":
        raise _wrong(f"peft_type = {shown(config.get('peft_type'))}", "LORA")
    for field, neutral in _NEUTRAL.items():
        if config.get(field, neutral[0]) not in neutral:
            raise _wrong(
                f"{field} = {shown(config[field])}",
                f"{field} = {neutral[0]!r}",
                "Train an adapter without it, or merge it into the weights of the model.",
            )
    return config


def _rank(config: Mapping[str, Any], max_rank: int) -> tuple[int, float]:
    """Return the rank, and the factor on the products."""
    rank, alpha, use_rslora = config.get("r"), config.get("lora_alpha"), config.get("use_rslora")
    if type(rank) is not int or rank < 1:
        raise _wrong(f"r = {shown(rank)}", "a whole number of at least 1")
    if rank > max_rank:
        raise _wrong(f"r = {rank}", f"at most {max_rank}", f"Pass --max-lora-rank {rank}.")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not np.isfinite(alpha):
        raise _wrong(f"lora_alpha = {shown(alpha)}", "a number")
    if use_rslora not in (None, True, False):
        raise _wrong(f"use_rslora = {shown(use_rslora)}", "true or false")
    return rank, float(alpha) / (rank**0.5 if use_rslora else rank)


def _pairs(folder: Path, parts: Mapping[str, LayerPart]) -> dict[str, dict[str, StoredTensor]]:
    """Return the tensors "A" and "B" of each layer."""
    pairs: dict[str, dict[str, StoredTensor]] = {}
    layers = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in parts))
    for name, tensor in read_file(folder / TENSORS).items():
        found = _NAME.fullmatch(name.removeprefix(PREFIX))
        if found is None:
            raise _wrong(f"tensor {shown(name)}", "lora_A.weight and lora_B.weight of layers only")
        module, kind = found.groups()
        if module not in parts:
            raise _wrong(
                f"layer {shown(module)}, which this model does not have or cannot adapt",
                f"the layers {layers} of the model",
                "Pass an adapter for this model; fused layers, experts, embeddings and heads "
                "cannot have adapters. See lora_targets if the layer is left out there.",
            )
        pairs.setdefault(module, {})[kind] = tensor
    if not pairs:
        raise _wrong(f"{TENSORS} has no tensors", "the tensors of at least one layer")
    return pairs
