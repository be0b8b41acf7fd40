"""The language model of a checkpoint that also reads images: its configuration and its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay_models.fields import bad_field
from enginebay_models.safetensors_file import StoredTensor

COMPOSITE = ("Gemma3ForConditionalGeneration",)
"""Architectures of which the language model is served."""

_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.")
_OWN_FIELDS = ("architectures", "bos_token_id", "eos_token_id", "pad_token_id")
"""Fields that the whole model's configuration decides."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the language model, as a language model alone would have it.

    That of another architecture is returned unchanged. CheckpointError when `text_config` is no
    object.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or not names or names[0] not in COMPOSITE:
        return config
    part = config.get("text_config", {})
    if not isinstance(part, Mapping):
        raise bad_field("text_config", part, "an object")
    whole = {name: value for name, value in config.items() if not name.endswith("_config")}
    if quantized := config.get("quantization_config"):
        whole["quantization_config"] = quantized
    own = {name: config[name] for name in _OWN_FIELDS if config.get(name) is not None}
    return whole | dict(part) | own


def text_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of the language model by the names of a language model alone.

    Published files have "language_model.model.layers...", and files that transformers 5 writes have
    "model.language_model.layers...".
    """
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        if not name.removeprefix("model.").startswith(_OTHER_PARTS):
            short = name.removeprefix("language_model.")
            found[short.replace("model.language_model.", "model.", 1)] = tensor
    return found
