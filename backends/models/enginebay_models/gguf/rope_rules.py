"""Reads the rotary positions of a GGUF file, as the rules that config.json has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from enginebay.errors import CheckpointError, shown
from enginebay_models.gguf.header import GgufFile
from enginebay_models.gguf.metadata import Metadata

ROPE_DIVISORS = "rope_freqs.weight"
"""Tensor of numbers that rotary frequencies are divided by; it is no weight."""
LONG_DIVISORS, SHORT_DIVISORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""The same for contexts longer than the original one, and for contexts up to it."""
ORIGINAL_CONTEXT = ".rope.scaling.original_context_length"


def head_dim(metadata: Metadata, *, is_partial: bool = False) -> int:
    """Return the size of a head. Values must have the same size, and so must rotary positions,
    unless `is_partial`.
    """
    heads = metadata.whole(".attention.head_count")
    size = max(1, metadata.whole(".embedding_length") // heads)
    size = metadata.whole(".attention.key_length", size)
    for name in (".attention.value_length", ".rope.dimension_count")[: 1 if is_partial else 2]:
        if metadata.whole(name, size) != size:
            raise metadata.refused(name, f"{size}, the size of a key")
    return size


def rope_scaling(metadata: Metadata, file: GgufFile) -> Mapping[str, Any] | None:
    """Return the rule of rotary positions; None for the plain one."""
    if LONG_DIVISORS in file.tensors or SHORT_DIVISORS in file.tensors:
        return _longrope(metadata, file)
    kind = metadata.text(".rope.scaling.type", "linear")
    factor = metadata.get(".rope.scaling.factor") or metadata.get(".rope.scale_linear") or 1.0
    if metadata.number(".rope.scaling.attn_factor", 1.0) != 1.0:
        raise metadata.refused(".rope.scaling.attn_factor", "1.0")
    _check_yarn_factor(metadata, kind)
    if ROPE_DIVISORS in file.tensors:
        return _divided(metadata, file)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        name = (
            ".rope.scaling.factor" if metadata.get(".rope.scaling.factor") else ".rope.scale_linear"
        )
        return {"rope_type": "linear", "factor": metadata.number(name)}
    if kind != "yarn":
        raise metadata.refused(".rope.scaling.type", "none, linear, yarn")
    return {
        "rope_type": "yarn",
        "factor": metadata.number(".rope.scaling.factor"),
        "original_max_position_embeddings": metadata.whole(
            ".rope.scaling.original_context_length", metadata.whole(".context_length")
        ),
        "beta_fast": metadata.number(".rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.number(".rope.scaling.yarn_beta_slow", 1.0),
    }


def _check_yarn_factor(metadata: Metadata, kind: str) -> None:
    """Raise CheckpointError for another factor on attention than that which the rule yarn has."""
    name, factor = ".rope.scaling.yarn_attn_factor", 1.0
    if kind == "yarn":
        factor = max(1.0, metadata.number(".rope.scaling.factor"))
    given, own = metadata.number(name, 1.0), 0.1 * math.log(factor) + 1.0
    if given != 1.0 and not math.isclose(given, own, rel_tol=1e-5):
        raise metadata.refused(name, "1.0" if own == 1.0 else f"1.0 or {own:.6g}, the rule's own")


def _divided(metadata: Metadata, file: GgufFile) -> Mapping[str, Any]:
    """Return the rule with a divisor per frequency, which files have for Llama 3."""
    divisors = _read_divisors(file, ROPE_DIVISORS, head_dim(metadata))
    context = metadata.whole(".context_length")
    return {
        "rope_type": "longrope",
        "short_factor": divisors,
        "long_factor": divisors,
        "factor": 1.0,
        "original_max_position_embeddings": context,
    }


def _longrope(metadata: Metadata, file: GgufFile) -> Mapping[str, Any]:
    """Return the rule with divisors for short and for long contexts, which files have for Phi-3."""
    size = head_dim(metadata, is_partial=True)
    rotated = metadata.whole(".rope.dimension_count", size)
    return {
        "rope_type": "longrope",
        "short_factor": _read_divisors(file, SHORT_DIVISORS, rotated),
        "long_factor": _read_divisors(file, LONG_DIVISORS, rotated),
        "attention_factor": metadata.number(".rope.scaling.attn_factor", 1.0),
        "original_max_position_embeddings": metadata.whole(ORIGINAL_CONTEXT, 4096),
    }


def _read_divisors(file: GgufFile, name: str, rotated: int) -> list[float]:
    """Return the numbers of a tensor: one for each pair of `rotated` features."""
    info = file.tensors.get(name)
    allowed = f"F32 and [{rotated // 2}], one number for each pair of rotated features"
    if info is None or info.type_name != "F32" or info.shape != (rotated // 2,):
        what = f"no tensor {name}"
        if info is not None:
            what = f"tensor {name} of type {info.type_name} and shape {shown(list(info.shape))}"
        raise CheckpointError(f"{file.path} has {what}", allowed, "Choose another file.")
    return np.frombuffer(info.data, "<f4", info.shape[0], info.start).tolist()
