"""CheckpointSource: a checkpoint by name, path or hub id, with everything that an engine needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from enginebay.config import NO_QUANTIZATION
from enginebay.contracts.model import Model, TokenInfo
from enginebay.weights import QuantizedArray, Weight, WeightFormat
from enginebay_models.awq import read_awq
from enginebay_models.checkpoint import (
    find_folder,
    find_tensors,
    read_architecture,
    read_config,
    read_token_info,
)
from enginebay_models.compressed_tensors import read_compressed_tensors
from enginebay_models.fields import bad_field
from enginebay_models.gptq import read_gptq
from enginebay_models.load import LoadProgress, Place, load_weights
from enginebay_models.packed import Stored, refused
from enginebay_models.quantized_tensors import Tensors, quantized_weights
from enginebay_models.safetensors_file import StoredTensor
from enginebay_models.sampling_defaults import read_sampling_defaults
from enginebay_models.tensors import HEAD
from enginebay_models.token_count import count_token_ids


class CheckpointSource:
    """A Hugging Face checkpoint: "demo", a folder, or a hub id.

    Raises CheckpointError when it cannot be used.
    """

    def __init__(self, name_or_path: str) -> None:
        self.folder: Path = find_folder(name_or_path)
        whole = read_config(self.folder)
        self.config: Mapping[str, Any] = text_config(whole)
        self._is_part = self.config is not whole
        if self._is_part and (whole.get(_TIED), self.config.get(_TIED)) == (True, False):
            has_head = any(name.endswith(HEAD) for name in find_tensors(self.folder))
            self.config = {**self.config, _TIED: not has_head}  # as transformers ties them
        self.architecture: str = read_architecture(self.config)
        self.token_info: TokenInfo = read_token_info(self.folder, self.config)

    @cached_property
    def quantization(self) -> str:
        """Return the name of the form of quantised weights. It is read when it is needed: a family
        that is not served is refused before a quantisation that is not served.
        """
        return quantization_of(self.config)

    @cached_property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Return the sampling of generation_config.json by field of SamplingParams."""
        return read_sampling_defaults(self.folder)

    @cached_property
    def num_token_ids(self) -> int | None:
        """Return the number of ids in tokenizer.json and tokenizer_config.json."""
        return count_token_ids(self.folder)

    def load_tokenizer(self) -> Any:
        """Load the tokenizer of the folder; CheckpointError when it has none."""
        from enginebay_models.tokenizer import load_tokenizer

        return load_tokenizer(self.folder)

    def quantized_weights(self, model: Model) -> Mapping[str, QuantizedArray]:
        """Return the StoredArrays of the quantised weights, by path."""
        return quantized_weights(model, self._tensors(model))

    def load_weights(
        self,
        model: Model,
        *,
        form: WeightFormat,
        place: Place,
        verify: bool = False,
        progress: LoadProgress | None = None,
    ) -> dict[str, Weight]:
        """Load every weight of `model`, each shard to its device; see `load.load_weights`."""
        stored = self._tensors(model)
        return load_weights(model, stored, form=form, place=place, verify=verify, progress=progress)

    def _tensors(self, model: Model) -> Tensors:
        stored = find_tensors(self.folder)
        if self._is_part:
            stored = text_tensors(stored)
        return read_stored(self.config, with_prefix(model, stored))


READERS: Mapping[str, Callable[[Mapping[str, Any], Stored], Tensors]] = {
    "gptq": read_gptq,
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
}
"""quant_method of quantization_config -> the function that reads its tensors."""


def quantization_of(config: Mapping[str, Any]) -> str:
    """Return quant_method of quantization_config, "none" if that is absent or null.
    CheckpointError for a method that is not served, and for none.
    """
    fields = config.get("quantization_config")
    if fields is None:
        return NO_QUANTIZATION
    if not isinstance(fields, Mapping):
        raise refused("quant_method", fields, ", ".join(READERS))
    method = fields.get("quant_method")
    if not isinstance(method, str) or method not in READERS:
        raise refused("quant_method", method, ", ".join(READERS))
    return method


def read_stored(config: Mapping[str, Any], stored: Stored) -> Tensors:
    """Return the tensors of a checkpoint, each quantised layer as one QuantizedTensor.

    CheckpointError, which names the field or the tensor with its dtype, for what is not served or
    does not fit together.
    """
    method = quantization_of(config)
    if method == NO_QUANTIZATION:
        return stored
    return READERS[method](config["quantization_config"], stored)


COMPOSITE: Mapping[str, Mapping[str, str]] = {
    "Gemma3ForConditionalGeneration": {},
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
    },
}
"""Architecture of a larger model whose language model is served -> architectures of the language
model by `text_config.model_type`. Where there are none, the language model has the architecture of
the larger model.
"""

_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.")
_OWN_FIELDS = ("architectures", "bos_token_id", "eos_token_id", "pad_token_id")
"""Fields that the whole model's configuration decides."""
_TIED = "tie_word_embeddings"


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the language model, as a language model alone would have it.

    That of another architecture is returned unchanged. CheckpointError when `text_config` is no
    object, or is one of a model that is not served.
    """
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    if not isinstance(first, str) or first not in COMPOSITE:
        return config
    part = config.get("text_config", {})
    if not isinstance(part, Mapping):
        raise bad_field("text_config", part, "an object")
    whole = {name: value for name, value in config.items() if not name.endswith("_config")}
    if quantized := config.get("quantization_config"):
        whole["quantization_config"] = quantized
    own = {name: config[name] for name in _OWN_FIELDS if config.get(name) is not None}
    if kinds := COMPOSITE[first]:
        kind = part.get("model_type", next(iter(kinds)))
        if not isinstance(kind, str) or kind not in kinds:
            raise bad_field("text_config.model_type", kind, " or ".join(kinds), is_null=True)
        own["architectures"] = [kinds[kind]]
    return whole | dict(part) | own


def with_prefix(model: Model, stored: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """Return tensors that were stored from a model without its head, whose names lack the first
    part ("h.0.ln_1.weight"), by the names of the whole model ("transformer.h.0.ln_1.weight").
    Names that begin with no part of the model, such as "score", stay as they are.
    """
    sources = model.tensor_sources().values()
    names = {name for source in sources for name in source.names if name != HEAD}
    prefixes = {name.partition(".")[0] for name in names}
    parts = {name.partition(".")[2].partition(".")[0] for name in names}
    if len(prefixes) != 1 or any(name.partition(".")[0] in prefixes for name in stored):
        return stored
    (prefix,) = prefixes
    return {
        f"{prefix}.{name}" if name.partition(".")[0] in parts else name: tensor
        for name, tensor in stored.items()
    }


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
