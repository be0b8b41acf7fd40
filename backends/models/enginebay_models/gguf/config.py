"""Makes the configuration of a GGUF file, with the fields that a config.json has."""

from __future__ import annotations

from typing import Any

from enginebay.errors import CheckpointError, UnknownNameError, unknown_name
from enginebay_models.gguf.architectures import ARCHITECTURES
from enginebay_models.gguf.header import GgufFile
from enginebay_models.gguf.metadata import Metadata
from enginebay_models.gguf.rope_rules import head_dim, rope_scaling

EMBEDDING_TENSOR, HEAD_TENSOR = "token_embd.weight", "output.weight"


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
        "head_dim": head_dim(metadata, is_partial=architecture.is_partly_rotated),
        **_eps(metadata, architecture.layer_norm_eps),
        "max_position_embeddings": metadata.whole(".context_length"),
        "tie_word_embeddings": HEAD_TENSOR not in file.tensors,
        "rope_theta": metadata.number(".rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(metadata, file),
        **architecture.fields(metadata, file),
    }


def _eps(metadata: Metadata, of_layer_norms: str | None) -> dict[str, float]:
    """Return the eps of norms, by its field in config.json."""
    if of_layer_norms is None:
        return {"rms_norm_eps": metadata.number(".attention.layer_norm_rms_epsilon")}
    return {of_layer_norms: metadata.number(".attention.layer_norm_epsilon")}
