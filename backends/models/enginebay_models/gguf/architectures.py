"""The architectures of GGUF files: what config.json has for each of them, and how its files differ
from the tensors of the models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from enginebay_models.gguf.header import GgufFile
from enginebay_models.gguf.metadata import Metadata
from enginebay_models.gguf.rope_rules import ORIGINAL_CONTEXT, head_dim
from enginebay_models.hf_config import DEFAULT_WINDOW, FULL, SLIDING

PARTS: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
"""Parts of the names of a layer's tensors: in a file -> in models, for most architectures."""
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Parts of names where results of attention and MLP have norms."""
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}


@dataclasses.dataclass(frozen=True)
class GgufArchitecture:
    """An architecture of GGUF files: the class that config.json names for it, and the fields that
    other architectures do not have.

    `own_parts`: parts of names that differ from PARTS, or are more. `is_interleaved`: files have
    the two features of a rotary pair beside each other, and models the first features of all pairs
    first. `norm_offset`: what files add to weights of norms. `is_partly_rotated`: files may rotate
    a part of each head.
    """

    hf_class: str
    fields: Callable[[Metadata, GgufFile], Mapping[str, Any]]
    own_parts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_interleaved: bool = False
    norm_offset: int = 0
    is_partly_rotated: bool = False

    @property
    def parts(self) -> Mapping[str, str]:
        """Parts of the names of a layer's tensors: in a file -> in models."""
        return {**PARTS, **self.own_parts}


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
    head_scale = head_dim(metadata) ** -0.5
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
    size = head_dim(metadata, is_partial=True)
    window = metadata.whole(".attention.sliding_window", 0, least=0)
    return {
        "sliding_window": window or None,
        "partial_rotary_factor": metadata.whole(".rope.dimension_count", size) / size,
        "original_max_position_embeddings": metadata.whole(ORIGINAL_CONTEXT, 4096),
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
    return hidden // heads if is_27b else head_dim(metadata)


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
    "gemma": GgufArchitecture("GemmaForCausalLM", _gemma, norm_offset=1),
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", _gemma2, _SANDWICH, norm_offset=1),
    "gemma3": GgufArchitecture("Gemma3ForCausalLM", _gemma3, _SANDWICH, norm_offset=1),
    "granite": GgufArchitecture("GraniteForCausalLM", _granite, is_interleaved=True),
    "llama": GgufArchitecture("LlamaForCausalLM", _llama, is_interleaved=True),
    "olmo2": GgufArchitecture("Olmo2ForCausalLM", _olmo2, _SANDWICH),
    "phi3": GgufArchitecture("Phi3ForCausalLM", _phi3, _FUSED, is_partly_rotated=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", _qwen2),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", _qwen3),
    "qwen3moe": GgufArchitecture("Qwen3MoeForCausalLM", _qwen3moe),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", _smollm3, is_interleaved=True),
}
