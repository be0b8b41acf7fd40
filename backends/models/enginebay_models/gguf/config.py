"""Makes the configuration of a GGUF file, with the fields that a config.json has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from enginebay.errors import CheckpointError, UnknownNameError, shown, unknown_name
from enginebay_models.gguf.header import GgufFile
from enginebay_models.gguf.metadata import Metadata
from enginebay_models.hf_config import DEFAULT_WINDOW, FULL, SLIDING

ROPE_DIVISORS = "rope_freqs.weight"
"""Tensor of numbers that rotary frequencies are divided by; it is no weight."""
LONG_DIVISORS, SHORT_DIVISORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""The same for contexts longer than the original one, and for contexts up to it."""
_ORIGINAL_CONTEXT = ".rope.scaling.original_context_length"
EMBEDDING_TENSOR, HEAD_TENSOR = "token_embd.weight", "output.weight"


@dataclasses.dataclass(frozen=True)
class GgufArchitecture:
    """An architecture of GGUF files: the class that config.json names for it, and the fields that
    other architectures do not have.
    """

    hf_class: str
    fields: Callable[[Metadata, GgufFile], Mapping[str, Any]]


def _llama(metadata: Metadata, file: GgufFile) -> Mapping[str, Any]:
    if metadata.whole(".expert_count", 0, least=0):
        raise metadata.refused(".expert_count", "0: experts of this architecture are not served")
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def _qwen2(metadata: Metadata, file: GgufFile) -> Mapping[str, Any]:
    return {}


def _qwen3(metadata: Metadata, file: GgufFile) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors}


def _qwen3moe(metadata: Metadata, file: GgufFile) -> Mapping[str, Any]:
    """Return the fields of the experts. The weights of the chosen ones are normalised, as in
    llama.cpp.
    """
    if metadata.number(".expert_weights_scale", 1.0) != 1.0:
        raise metadata.refused(".expert_weights_scale", "1.0")
    return _qwen3(metadata, file) | {
        "num_experts": metadata.whole(".expert_count"),
        "num_experts_per_tok": metadata.whole(".expert_used_count"),
        "moe_intermediate_size": metadata.whole(".expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _granite(metadata: Metadata, file: GgufFile) -> dict[str, Any]:
    """Return the factors of Granite. Files of its models without rotary positions are refused."""
    if metadata.get(".rope.scaling.finetuned") is False:
        raise metadata.refused(".rope.scaling.finetuned", "true, or absent")
    head_scale = _head_dim(metadata) ** -0.5
    return dict(_llama(metadata, file)) | {
        "attention_multiplier": metadata.number(".attention.scale", head_scale),
        "embedding_multiplier": metadata.number(".embedding_scale", 1.0),
        "residual_multiplier": metadata.number(".residual_scale", 1.0),
        "logits_scaling": metadata.number(".logit_scale", 1.0),
    }


def _olmo2(metadata: Metadata, file: GgufFile) -> Mapping[str, Any]:
    if metadata.get(".attention.sliding_window"):
        raise metadata.refused(".attention.sliding_window", "absent: OLMo 3 is not served so")
    return {}


def _smollm3(metadata: Metadata, file: GgufFile) -> Mapping[str, Any]:
    """Every fourth layer has no rotary positions, as in llama.cpp: a file does not say it."""
    return dict(_llama(metadata, file)) | {"no_rope_layer_interval": 4}


def _phi3(metadata: Metadata, file: GgufFile) -> Mapping[str, Any]:
    """Return the window, and the share of a head that is rotated."""
    size = _head_dim(metadata, is_partial=True)
    window = metadata.whole(".attention.sliding_window", 0, least=0)
    return {
        "sliding_window": window or None,
        "partial_rotary_factor": metadata.whole(".rope.dimension_count", size) / size,
        "original_max_position_embeddings": metadata.whole(_ORIGINAL_CONTEXT, 4096),
    }


def _gemma(metadata: Metadata, file: GgufFile) -> Mapping[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh"}


_GEMMA2_27B_LAYERS = 46
_GEMMA3_27B_LAYERS = 62
_GEMMA3_PATTERN = 6


def _query_scalar(metadata: Metadata, layers_of_27b: int) -> int:
    """Return what the factor of the scores is made of, which a file does not have: the size of a
    head, or hidden size / heads in the model of 27 billion weights, which has so many layers.
    """
    heads, hidden = metadata.whole(".attention.head_count"), metadata.whole(".embedding_length")
    is_27b = metadata.whole(".block_count") == layers_of_27b
    return hidden // heads if is_27b else _head_dim(metadata)


def _gemma2(metadata: Metadata, file: GgufFile) -> Mapping[str, Any]:
    """Return the fields of Gemma 2, with llama.cpp's defaults of keys that a file lacks."""
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scalar(metadata, _GEMMA2_27B_LAYERS),
        "sliding_window": metadata.whole(".attention.sliding_window", DEFAULT_WINDOW),
        "attn_logit_softcapping": metadata.number(".attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number(".final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: Metadata, file: GgufFile) -> Mapping[str, Any]:
    """Return the fields of Gemma 3."""
    layers = metadata.whole(".block_count")
    fields: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scalar(metadata, _GEMMA3_27B_LAYERS),
        "rope_local_base_freq": metadata.number(".rope.freq_base_swa", 10000.0),
    }
    if metadata.get(".final_logit_softcapping"):
        fields["final_logit_softcapping"] = metadata.number(".final_logit_softcapping")
    window = metadata.whole(".attention.sliding_window", 0, least=0)
    pattern = metadata.get(".attention.sliding_window_pattern")
    if not window:
        fields["layer_types"] = [FULL] * layers
    elif isinstance(pattern, np.ndarray):
        kinds = metadata.numbers(".attention.sliding_window_pattern", layers)
        assert kinds is not None, "it is an array"
        fields |= {"sliding_window": window}
        fields["layer_types"] = [SLIDING if kind else FULL for kind in kinds]
    else:
        every = metadata.whole(".attention.sliding_window_pattern", _GEMMA3_PATTERN)
        fields |= {"sliding_window": window, "sliding_window_pattern": every}
    return fields


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "gemma": GgufArchitecture("GemmaForCausalLM", _gemma),
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", _gemma2),
    "gemma3": GgufArchitecture("Gemma3ForCausalLM", _gemma3),
    "granite": GgufArchitecture("GraniteForCausalLM", _granite),
    "llama": GgufArchitecture("LlamaForCausalLM", _llama),
    "olmo2": GgufArchitecture("Olmo2ForCausalLM", _olmo2),
    "phi3": GgufArchitecture("Phi3ForCausalLM", _phi3),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", _qwen2),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", _qwen3),
    "qwen3moe": GgufArchitecture("Qwen3MoeForCausalLM", _qwen3moe),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", _smollm3),
}


PARTLY_ROTATED = ("phi3",)
"""Architectures whose files may rotate a part of each head."""


def make_config_json(metadata: Metadata, file: GgufFile) -> dict[str, Any]:
    """Return the configuration of a file as config.json has it.

    CheckpointError, which names the key, for an architecture or a value that is not served.
    """
    name = metadata.architecture
    if name not in ARCHITECTURES:
        todo = "Choose a model of one of these, or its checkpoint in safetensors."
        error: UnknownNameError = unknown_name("GGUF architecture", name, ARCHITECTURES, todo)
        raise CheckpointError(f"{file.path}: {error}")
    architecture = ARCHITECTURES[name]
    heads = metadata.whole(".attention.head_count")
    embedding = file.tensors.get(EMBEDDING_TENSOR)
    if embedding is None or len(embedding.shape) != 2:
        given = f"{file.path} has no tensor {EMBEDDING_TENSOR} of two dimensions"
        raise CheckpointError(given, "a whole model", "Choose another file.")
    return {
        "architectures": [architecture.hf_class],
        "model_type": name,
        "vocab_size": embedding.shape[0],
        "hidden_size": metadata.whole(".embedding_length"),
        "intermediate_size": metadata.whole(".feed_forward_length"),
        "num_hidden_layers": metadata.whole(".block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.whole(".attention.head_count_kv", heads),
        "head_dim": _head_dim(metadata, is_partial=name in PARTLY_ROTATED),
        "rms_norm_eps": metadata.number(".attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.whole(".context_length"),
        "tie_word_embeddings": HEAD_TENSOR not in file.tensors,
        "rope_theta": metadata.number(".rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata, file),
        **architecture.fields(metadata, file),
    }


def _head_dim(metadata: Metadata, *, is_partial: bool = False) -> int:
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


def _rope_scaling(metadata: Metadata, file: GgufFile) -> Mapping[str, Any] | None:
    """Return the rule of rotary positions; None for the plain one."""
    if LONG_DIVISORS in file.tensors or SHORT_DIVISORS in file.tensors:
        return _longrope(metadata, file)
    kind = metadata.text(".rope.scaling.type", "linear")
    factor = metadata.get(".rope.scaling.factor") or metadata.get(".rope.scale_linear") or 1.0
    for name in (".rope.scaling.attn_factor", ".rope.scaling.yarn_attn_factor"):
        if metadata.number(name, 1.0) != 1.0:
            raise metadata.refused(name, "1.0")
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


def _divided(metadata: Metadata, file: GgufFile) -> Mapping[str, Any]:
    """Return the rule with a divisor per frequency, which files have for Llama 3."""
    divisors = _read_divisors(file, ROPE_DIVISORS, _head_dim(metadata))
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
    size = _head_dim(metadata, is_partial=True)
    rotated = metadata.whole(".rope.dimension_count", size)
    return {
        "rope_type": "longrope",
        "short_factor": _read_divisors(file, SHORT_DIVISORS, rotated),
        "long_factor": _read_divisors(file, LONG_DIVISORS, rotated),
        "attention_factor": metadata.number(".rope.scaling.attn_factor", 1.0),
        "original_max_position_embeddings": metadata.whole(_ORIGINAL_CONTEXT, 4096),
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
