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
from enginebay_models.gguf.rope_rules import ORIGINAL_CONTEXT, head_dim, rope_scaling
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
_GLM4 = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
_GPT_NEOX = {
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_OF_GPT_NEOX = {
    "model.embed_tokens.": "gpt_neox.embed_in.",
    "model.layers.": "gpt_neox.layers.",
    "model.norm.": "gpt_neox.final_layer_norm.",
    "lm_head.": "embed_out.",
}
_HUNYUAN = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
_SEED_OSS = {"post_attention_norm": "post_attention_layernorm"}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_STARCODER2 = {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}


@dataclasses.dataclass(frozen=True)
class GgufArchitecture:
    """An architecture of GGUF files: the class that config.json names for it, and the fields that
    other architectures do not have.

    `own_parts`: parts of names that differ from PARTS, or are more. `beginnings`: how names begin
    in other models -> how they begin in models of this architecture. `is_interleaved`: files have
    the two features of a rotary pair beside each other, and models the first features of all pairs
    first. `is_stacked`: files have all queries, all keys, then all values in one tensor, and models
    those of each head together. `norm_offset`: what files add to weights of norms.
    `is_partly_rotated`: files may rotate a part of each head. `layer_norm_eps`: the field of the
    eps of LayerNorms; without it, norms are RMS norms.
    """

    hf_class: str
    fields: Callable[[Metadata, GgufFile], Mapping[str, Any]]
    own_parts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    beginnings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_interleaved: bool = False
    is_stacked: bool = False
    norm_offset: int = 0
    is_partly_rotated: bool = False
    layer_norm_eps: str | None = None

    @property
    def parts(self) -> Mapping[str, str]:
        """Parts of the names of a layer's tensors: in a file -> in models."""
        return {**PARTS, **self.own_parts}


_PERIOD = 4
"""Layers without a window are each fourth one, unless a number in the file says another."""


def _refuse(metadata: Metadata, *names: str) -> None:
    """Raise CheckpointError for the first key with a value that is neither 0 nor false."""
    for name in names:
        if np.any(metadata.get(name)):
            raise metadata.refused(name, "0, or absent")


def _window_period(metadata: Metadata) -> int:
    """Return which layers have no window: each one of so many. llama.cpp reads a number, and takes
    4 in place of a list of layers, so another list is refused.
    """
    name = ".attention.sliding_window_pattern"
    layers = metadata.whole(".block_count")
    if not isinstance(metadata.get(name), np.ndarray):
        return metadata.whole(name, _PERIOD)
    kinds = metadata.numbers(name, layers)
    assert kinds is not None, "it is an array"
    if [bool(kind) for kind in kinds] != [(layer + 1) % _PERIOD != 0 for layer in range(layers)]:
        raise metadata.refused(name, f"a window in all layers but each {_PERIOD}th")
    return _PERIOD


def _rotated_share(metadata: Metadata) -> dict[str, float]:
    """Return the share of a head that is rotated."""
    size = head_dim(metadata, is_partial=True)
    return {"partial_rotary_factor": metadata.whole(".rope.dimension_count", size) / size}


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
    """Return the fields of OLMo 3 if a file has windows. Its rotary rule may be scaled in the
    layers without them alone.
    """
    if not metadata.get(".attention.sliding_window"):
        return {}
    plain = {"rope_type": "default", "rope_theta": metadata.number(".rope.freq_base", 10000.0)}
    rule, period = rope_scaling(metadata, file) or {}, _window_period(metadata)
    layers = range(1, metadata.whole(".block_count") + 1)
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": metadata.whole(".attention.sliding_window"),
        "layer_types": [SLIDING if layer % period else FULL for layer in layers],
        "rope_scaling": None,
        "rope_parameters": {FULL: {**plain, **rule}, SLIDING: plain},
    }


def _smollm3(metadata: Metadata, file: GgufFile) -> Mapping[str, Any]:
    """Every fourth layer has no rotary positions, as in llama.cpp: a file does not say it."""
    return dict(_llama(metadata, file)) | {"no_rope_layer_interval": 4}


def _phi3(metadata: Metadata, file: GgufFile) -> Mapping[str, Any]:
    """Return the window, and the share of a head that is rotated."""
    window = metadata.whole(".attention.sliding_window", 0, least=0)
    return {
        "sliding_window": window or None,
        "original_max_position_embeddings": metadata.whole(ORIGINAL_CONTEXT, 4096),
        **_rotated_share(metadata),
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


def _arcee(metadata: Metadata, file: GgufFile) -> Mapping[str, Any]:
    return dict(_llama(metadata, file)) | {"hidden_act": "relu2"}


def _seed_oss(metadata: Metadata, file: GgufFile) -> Mapping[str, Any]:
    out = "blk.0.attn_output.bias" in file.tensors
    return dict(_llama(metadata, file)) | {"attention_out_bias": out}


def _ernie4_5(metadata: Metadata, file: GgufFile) -> Mapping[str, Any]:
    """A file with biases is refused, because llama.cpp does not read all of them."""
    return {"use_bias": False}


_EXAONE4_32B_LAYERS = 64


def _exaone4(metadata: Metadata, file: GgufFile) -> Mapping[str, Any]:
    """Return the windows, which llama.cpp has in the model of 32 billion weights alone, known by
    its layers.
    """
    _refuse(metadata, ".nextn_predict_layers")
    window = ".attention.sliding_window"
    if metadata.whole(".block_count") != _EXAONE4_32B_LAYERS:
        if metadata.get(window):
            allowed = f"absent, without {_EXAONE4_32B_LAYERS} layers: llama.cpp has no windows here"
            raise metadata.refused(window, allowed)
        return {"sliding_window": None}
    period = _window_period(metadata)
    return {
        "sliding_window": metadata.whole(window, DEFAULT_WINDOW),
        "sliding_window_pattern": period,
    }


def _hunyuan(metadata: Metadata, file: GgufFile) -> Mapping[str, Any]:
    """Positions of images, and a base that llama.cpp computes, are of other models."""
    _refuse(metadata, ".rope.dimension_sections", ".rope.scaling.alpha")
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors}


def _glm4(metadata: Metadata, file: GgufFile) -> Mapping[str, Any]:
    """Positions of images, and layers that predict later tokens, are of other models."""
    _refuse(metadata, ".rope.dimension_sections", ".nextn_predict_layers")
    bias = "blk.0.attn_q.bias" in file.tensors
    return {"attention_bias": bias} | _rotated_share(metadata)


def _olmoe(metadata: Metadata, file: GgufFile) -> dict[str, Any]:
    """Return the fields of the experts. The weights of the chosen ones are not normalised, as in
    llama.cpp.
    """
    _refuse(metadata, ".expert_weights_norm")
    if metadata.number(".expert_weights_scale", 1.0) != 1.0:
        raise metadata.refused(".expert_weights_scale", "1.0")
    return {
        "num_experts": metadata.whole(".expert_count"),
        "num_experts_per_tok": metadata.whole(".expert_used_count"),
        "norm_topk_prob": False,
    }


def _qwen2moe(metadata: Metadata, file: GgufFile) -> Mapping[str, Any]:
    """Return the fields of the experts and of the shared one. Without widths, the chosen experts
    share that of an MLP, and the shared one has it.
    """
    width = metadata.whole(".feed_forward_length")
    of_one = width // metadata.whole(".expert_used_count")
    name = ".expert_shared_feed_forward_length"
    return _olmoe(metadata, file) | {
        "moe_intermediate_size": metadata.whole(".expert_feed_forward_length", of_one),
        "shared_expert_intermediate_size": metadata.whole(name, width),
    }


def _starcoder2(metadata: Metadata, file: GgufFile) -> Mapping[str, Any]:
    """Files of StarCoder2 have no windows, in llama.cpp either."""
    return {"hidden_act": "gelu_pytorch_tanh", "sliding_window": None}


def _stablelm(metadata: Metadata, file: GgufFile) -> Mapping[str, Any]:
    """Attention and MLP are parallel where a file has no norm for the MLP: its key may be wrong."""
    return {
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors,
        "use_qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in file.tensors,
    } | _rotated_share(metadata)


def _gptneox(metadata: Metadata, file: GgufFile) -> Mapping[str, Any]:
    """Return the fields of GPT-NeoX. A file does not name the activation: it is llama.cpp's."""
    heads, name = metadata.whole(".attention.head_count"), ".attention.head_count_kv"
    if metadata.whole(name, heads) != heads:
        raise metadata.refused(name, f"{heads}, the number of heads")
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "use_parallel_residual": metadata.flag(".use_parallel_residual", default=True),
    } | _rotated_share(metadata)


def _command_r(metadata: Metadata, file: GgufFile) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "logit_scale": metadata.number(".logit_scale"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def _cohere2(metadata: Metadata, file: GgufFile) -> Mapping[str, Any]:
    return _command_r(metadata, file) | {
        "sliding_window": metadata.whole(".attention.sliding_window"),
        "sliding_window_pattern": _window_period(metadata),
    }


def _nemotron(metadata: Metadata, file: GgufFile) -> Mapping[str, Any]:
    return dict(_arcee(metadata, file)) | _rotated_share(metadata)


def _mistral3(metadata: Metadata, file: GgufFile) -> Mapping[str, Any]:
    """Return the rotary rule with the factor on queries, which is 1 in files without a key for it.
    The rule yarn has no factor on attention here: `mscale` and `mscale_all_dim` cancel each other.
    """
    _refuse(metadata, ".expert_count")
    rule = dict(rope_scaling(metadata, file) or {"rope_type": "default"})
    if rule["rope_type"] == "yarn":
        name = ".rope.scaling.yarn_log_multiplier"
        if metadata.number(name) != 1.0:
            raise metadata.refused(name, "1.0")
        rule |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    context = metadata.whole(".context_length")
    name = ".attention.temperature_scale"
    beta = metadata.number(name) if metadata.get(name) else 0.0
    return {
        "rope_scaling": rule
        | {
            "llama_4_scaling_beta": beta,
            "original_max_position_embeddings": metadata.whole(ORIGINAL_CONTEXT, context),
        },
    }


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "arcee": GgufArchitecture("ArceeForCausalLM", _arcee, is_interleaved=True),
    "cohere2": GgufArchitecture("Cohere2ForCausalLM", _cohere2, layer_norm_eps="layer_norm_eps"),
    "command-r": GgufArchitecture("CohereForCausalLM", _command_r, layer_norm_eps="layer_norm_eps"),
    "ernie4_5": GgufArchitecture("Ernie4_5ForCausalLM", _ernie4_5),
    "exaone4": GgufArchitecture("Exaone4ForCausalLM", _exaone4, _SANDWICH),
    "gemma": GgufArchitecture("GemmaForCausalLM", _gemma, norm_offset=1),
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", _gemma2, _SANDWICH, norm_offset=1),
    "gemma3": GgufArchitecture("Gemma3ForCausalLM", _gemma3, _SANDWICH, norm_offset=1),
    "glm4": GgufArchitecture("Glm4ForCausalLM", _glm4, _GLM4, is_partly_rotated=True),
    "gptneox": GgufArchitecture(
        "GPTNeoXForCausalLM",
        _gptneox,
        _GPT_NEOX,
        _OF_GPT_NEOX,
        is_stacked=True,
        is_partly_rotated=True,
        layer_norm_eps="layer_norm_eps",
    ),
    "granite": GgufArchitecture("GraniteForCausalLM", _granite, is_interleaved=True),
    "hunyuan-dense": GgufArchitecture("HunYuanDenseV1ForCausalLM", _hunyuan, _HUNYUAN),
    "llama": GgufArchitecture("LlamaForCausalLM", _llama, is_interleaved=True),
    "mistral3": GgufArchitecture("Ministral3ForCausalLM", _mistral3, is_interleaved=True),
    "nemotron": GgufArchitecture(
        "NemotronForCausalLM",
        _nemotron,
        norm_offset=1,
        is_partly_rotated=True,
        layer_norm_eps="norm_eps",
    ),
    "olmo2": GgufArchitecture("Olmo2ForCausalLM", _olmo2, _SANDWICH),
    "olmoe": GgufArchitecture("OlmoeForCausalLM", _olmoe),
    "phi3": GgufArchitecture("Phi3ForCausalLM", _phi3, _FUSED, is_partly_rotated=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", _qwen2),
    "qwen2moe": GgufArchitecture("Qwen2MoeForCausalLM", _qwen2moe, _SHARED_EXPERT),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", _qwen3),
    "qwen3moe": GgufArchitecture("Qwen3MoeForCausalLM", _qwen3moe),
    "seed_oss": GgufArchitecture("SeedOssForCausalLM", _seed_oss, _SEED_OSS),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", _smollm3, is_interleaved=True),
    "stablelm": GgufArchitecture(
        "StableLmForCausalLM", _stablelm, is_partly_rotated=True, layer_norm_eps="layer_norm_eps"
    ),
    "starcoder2": GgufArchitecture(
        "Starcoder2ForCausalLM", _starcoder2, _STARCODER2, layer_norm_eps="norm_epsilon"
    ),
}
