"""Reads adapters as PEFT writes them: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from enginebay.contracts.adapters import AdapterRankError
from enginebay.errors import CheckpointError, InputError, shown, shown_text
from enginebay.json_text import parse_json
from enginebay.regular_files import check_regular, read_regular
from enginebay_lora.layers import Adapted, AdaptedEmbedding, by_module
from enginebay_lora.peft_fields import check_fields, wrong
from enginebay_models.safetensors_file import StoredTensor, read_file

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 16 * 2**20
PREFIX = "base_model.model."
_NAME = re.compile(
    r"(?P<module>.+)\.(?:lora_(?P<kind>[AB])\.weight|lora_embedding_(?P<embedding>[AB])"
    r"|(?P<base>base_layer\.weight))"
)
TARGETED = ("embed_tokens", "lm_head")
"""Layers that have slots only if lora_targets names them."""
_PLAIN = re.compile(r"\^?(?:\w|\\?\.)+")


def read_adapter(
    folder: str | Path, layers: Mapping[str, Adapted], max_rank: int, dtype: np.dtype
) -> dict[str, np.ndarray]:
    """Return the adapter weights of one slot by path, [rank, ...] in `dtype`. The factor
    lora_alpha / r (rsLoRA: lora_alpha / sqrt(r)) of each layer is part of its weights b.

    layers: the weights of the model that may have adapters, by path. CheckpointError, which names
    the field or the tensor, for an adapter that cannot be used; AdapterRankError for a rank above
    `max_rank`.
    """
    folder, parts = Path(folder), by_module(layers)
    config = _read_config(folder)
    scales = Scales.of(config, max_rank)
    pairs: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    stored = _pairs(folder, layers)
    _check_tying(config, stored)
    for module, pair in stored.items():
        (outputs, inputs), (rank, factor) = parts[module].shape, scales.of_module(module)
        if rank > max_rank:
            raise _rank_error(f"rank {rank} of layer {shown(module)}", rank, max_rank)
        for kind, allowed in (("A", (rank, inputs)), ("B", (outputs, rank))):
            if kind not in pair:
                raise wrong(f"layer {shown(module)} has no tensor lora_{kind}", "both tensors")
            if pair[kind].shape != allowed:
                given = f"tensor {shown(pair[kind].name)} has shape {list(pair[kind].shape)}"
                raise wrong(given, f"{list(allowed)}, for rank {rank} and this model")
        a, b = (pair[kind].view().astype(np.float32) for kind in "AB")
        with np.errstate(over="ignore", invalid="ignore"):
            pairs[module] = a, b * np.float32(factor)
            finite = all(
                np.isfinite(one.astype(dtype).astype(np.float32)).all() for one in pairs[module]
            )
        if not finite:
            raise wrong(f"layer {shown(module)} holds NaN or infinity", f"finite {dtype} weights")
    arrays: dict[str, np.ndarray] = {}
    for layer in layers.values():
        own = {part.module: pairs[part.module] for part in layer.parts if part.module in pairs}
        if own:
            arrays |= {path: one.astype(dtype) for path, one in layer.arrays(own).items()}
    return arrays


def home_of(folder: Path) -> Path:
    """Return the folder out of which no link in `folder` may lead: itself, or for a snapshot in the
    cache of the hub the folder of its repository, where the files are.
    """
    return folder.parent.parent if folder.parent.name == "snapshots" else folder


def why_unreadable(error: OSError | ValueError) -> str:
    """Return why a path cannot be read: it may hold what no path can, such as a NUL."""
    return (isinstance(error, OSError) and error.strerror) or shown_text(str(error))


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        text = read_regular(folder / CONFIG, MAX_CONFIG_BYTES, inside=home_of(folder))
    except InputError as error:
        raise CheckpointError(f"the adapter cannot be used: {error}") from None
    except (OSError, ValueError) as error:
        raise wrong(
            f"{shown_text(str(folder))} cannot be read ({why_unreadable(error)})",
            f"a folder with {CONFIG} and {TENSORS}",
            "Pass the folder that PEFT's save_pretrained() has written.",
        ) from None
    try:
        config = parse_json(text)
    except (InputError, UnicodeDecodeError):
        config = None
    if not isinstance(config, dict):
        raise wrong(f"{folder / CONFIG} is not a JSON object", "a configuration of PEFT")
    if config.get("peft_type") != "LORA":
        raise wrong(f"peft_type = {shown(config.get('peft_type'))}", "LORA")
    check_fields(config)
    return config


def _check_tying(config: Mapping[str, Any], modules: Iterable[str]) -> None:
    """Refuse an adapter of an embedding that PEFT also applies to the head that is tied to it."""
    tying = config.get("ensure_weight_tying")
    if tying in (None, False):
        return
    if tying is not True:
        raise wrong(f"ensure_weight_tying = {shown(tying)}", "true or false")
    if tied := [one for one in modules if one.rpartition(".")[2] in TARGETED]:
        raise wrong(
            f"ensure_weight_tying = True with matrices of layer {shown(tied[0])}",
            "ensure_weight_tying = False",
            "Train an adapter without it, or merge it into the weights of the model.",
        )


@dataclasses.dataclass(frozen=True)
class Scales:
    """The rank and the factor of each layer: those of the configuration, or of the first entry of
    `rank_pattern` and `alpha_pattern` that names the layer or the end of its name.
    """

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    is_stable: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], max_rank: int) -> Scales:
        """Check the fields of a configuration."""
        rank, is_stable = config.get("r"), config.get("use_rslora")
        if not _is_rank(rank):
            raise wrong(f"r = {shown(rank)}", "a whole number of at least 1")
        if rank > max_rank and not config.get("rank_pattern"):
            raise _rank_error(f"r = {rank}", rank, max_rank)
        if not _is_number(config.get("lora_alpha")):
            raise wrong(f"lora_alpha = {shown(config.get('lora_alpha'))}", "a number")
        if is_stable not in (None, True, False):
            raise wrong(f"use_rslora = {shown(is_stable)}", "true or false")
        ranks = _pattern(config, "rank_pattern", _is_rank, "whole numbers of at least 1")
        alphas = _pattern(config, "alpha_pattern", _is_number, "numbers")
        return cls(rank, float(config["lora_alpha"]), ranks, alphas, bool(is_stable))

    def of_module(self, module: str) -> tuple[int, float]:
        """Return the rank of a layer, and the factor on its products."""
        rank = next((r for name, r in self.ranks.items() if _names(name, module)), self.rank)
        alpha = next((a for name, a in self.alphas.items() if _names(name, module)), self.alpha)
        return rank, float(alpha) / (rank**0.5 if self.is_stable else rank)


def _is_rank(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 1


def _is_number(value: object) -> TypeGuard[float]:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < float(np.finfo(np.float32).max)
    )


def _names(pattern: str, module: str) -> bool:
    """Whether a key of rank_pattern or alpha_pattern names a layer; "^" binds it to the start."""
    name = pattern.removeprefix("^")
    return module == name or (name == pattern and module.endswith(f".{name}"))


def _pattern(
    config: Mapping[str, Any], field: str, is_allowed: Callable[[object], bool], allowed: str
) -> Mapping[str, Any]:
    """Return a field that maps names of layers to values; other regular expressions than names are
    refused.
    """
    given = config.get(field) or {}
    if not isinstance(given, dict):
        raise wrong(f"{field} = {shown(given)}", "an object of names of layers")
    for name, value in given.items():
        if not _PLAIN.fullmatch(name):
            raise wrong(f"{field} with the key {shown(name)}", "names of layers, or their ends")
        if not is_allowed(value):
            raise wrong(f"{field}[{shown(name)}] = {shown(value)}", allowed)
    return {name.replace("\\.", "."): value for name, value in given.items()}


def _rank_error(given: str, rank: int, max_rank: int) -> AdapterRankError:
    given = f"the adapter cannot be used: {given}"
    return AdapterRankError(given, f"at most {max_rank}", f"Pass --max-lora-rank {rank}.")


def _pairs(folder: Path, layers: Mapping[str, Adapted]) -> dict[str, dict[str, StoredTensor]]:
    """Return the tensors "A" and "B" of each layer."""
    pairs: dict[str, dict[str, StoredTensor]] = {}
    of_module = {part.module: one for one in layers.values() for part in one.parts}
    try:
        check_regular(folder / TENSORS, inside=home_of(folder))
    except InputError as error:
        raise CheckpointError(f"the adapter cannot be used: {error}") from None
    except OSError:
        pass  # read_file says what is missing
    for name, tensor in read_file(folder / TENSORS).items():
        found = _NAME.fullmatch(name.removeprefix(PREFIX))
        if found is None:
            allowed = "lora_A.weight and lora_B.weight, or lora_embedding_A and _B, of layers only"
            raise wrong(f"tensor {shown(name)}", allowed)
        module, kind, of_embedding, base = found.group("module", "kind", "embedding", "base")
        if module not in of_module:
            raise _unknown(module, of_module)
        if base and module.rpartition(".")[2] in TARGETED:
            continue  # PEFT saves the model's own weight beside the adapter of a head or embedding
        if base:
            raise wrong(f"tensor {shown(name)}", "tensors of adapters")
        if isinstance(of_module[module], AdaptedEmbedding) != bool(of_embedding):
            raise wrong(f"tensor {shown(name)}", "tensors of the kind of the layer")
        pairs.setdefault(module, {})[kind or of_embedding] = tensor
    if not pairs:
        raise wrong(f"{TENSORS} has no tensors", "the tensors of at least one layer")
    return pairs


def _unknown(module: str, known: Iterable[str]) -> CheckpointError:
    """The error for a layer that has no slots."""
    leaf = module.rpartition(".")[2]
    leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in known))
    todo = "Pass an adapter for this model; fused layers and experts cannot have adapters."
    if leaf in TARGETED:
        todo = f"Set lora_targets = {[*leaves, leaf]}, if the model has this layer of its own."
    return wrong(
        f"layer {shown(module)}, which this model does not have or cannot adapt",
        f"the layers {', '.join(leaves)} of the model",
        f"{todo} See lora_targets if the layer is left out there.",
    )
