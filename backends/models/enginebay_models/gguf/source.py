"""GgufSource: a model in one GGUF file, with everything that an engine needs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from enginebay.config import NO_QUANTIZATION
from enginebay.contracts.model import Model, TokenInfo
from enginebay.errors import CheckpointError
from enginebay.row_value import FromCheckpoint, declared
from enginebay.types import SamplingParams
from enginebay.weights import QuantizedArray, Weight, WeightFormat
from enginebay_models.checkpoint import read_architecture
from enginebay_models.gguf.config import make_config_json
from enginebay_models.gguf.header import GgufTensorInfo, read_parts
from enginebay_models.gguf.metadata import Metadata
from enginebay_models.gguf.tensors import check_shapes, open_tensors
from enginebay_models.gguf.vocabulary import GgufVocabulary, read_vocabulary
from enginebay_models.load import LoadProgress, Place, load_weights
from enginebay_models.quantized_tensors import QuantizedTensor, Tensors, quantized_weights
from enginebay_models.sampling_defaults import recommended

SAMPLING: Mapping[str, str] = {
    one.gguf: field
    for field, one in declared(SamplingParams, FromCheckpoint).items()
    if one.gguf is not None
}
"""Keys in general.sampling -> fields of SamplingParams with the same meaning."""

log = logging.getLogger("enginebay.models")


class GgufSource:
    """A GGUF file of llama.cpp. Raises CheckpointError when it cannot be used.

    `folder` is the path of the file.
    """

    def __init__(self, path: str) -> None:
        self.folder = Path(path).expanduser()
        self.file = read_parts(self.folder)
        metadata = Metadata(self.file)
        self.config: Mapping[str, Any] = make_config_json(metadata, self.file)
        self.architecture: str = read_architecture(self.config)
        self.vocabulary: GgufVocabulary = read_vocabulary(metadata)
        if len(self.vocabulary.tokens) > self.config["vocab_size"]:
            given = f"{self.folder} has {len(self.vocabulary.tokens)} tokens"
            allowed = f"at most {self.config['vocab_size']}, the rows of its embedding"
            raise CheckpointError(given, allowed, "Choose another file.")
        self.token_info: TokenInfo = self.vocabulary.token_info
        self.metadata = metadata

    @cached_property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Return the sampling that the file recommends, by field of SamplingParams."""
        found = {key: self.metadata.get(f"general.sampling.{key}") for key in SAMPLING}
        values = {SAMPLING[key]: value for key, value in found.items() if value is not None}
        return recommended(self.folder, values)

    @cached_property
    def tensors(self) -> Tensors:
        """The tensors by the names of models."""
        return open_tensors(self.file, self.config)

    @property
    def quantization(self) -> str:
        """Return "gguf" if a tensor is quantised."""
        found = any(isinstance(one, QuantizedTensor) for one in self.tensors.values())
        return "gguf" if found else NO_QUANTIZATION

    @property
    def num_token_ids(self) -> int:
        """Return the number of tokens in the file, without padding at its end."""
        return self.vocabulary.num_token_ids

    def load_tokenizer(self) -> Any:
        """Make the tokenizer of the file."""
        from enginebay.text.tokenizer import TextTokenizer
        from enginebay_models.gguf.tokenizer import GgufTokenizer

        return TextTokenizer(GgufTokenizer(self.vocabulary))

    def quantized_weights(self, model: Model) -> Mapping[str, QuantizedArray]:
        """Return the StoredArrays of the weights that the file's tensors quantise, by path."""
        return quantized_weights(model, self.tensors)

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
        check_shapes(model, self.file, self.tensors, self.config["model_type"])
        if form.quantized and form.quantization is None:
            for line in conversions(model, self.tensors, self.file.tensors, form):
                log.warning("%s: %s", self.folder.name, line)
        return load_weights(
            model, self.tensors, form=form, place=place, verify=verify, progress=progress
        )


def conversions(
    model: Model,
    tensors: Tensors,
    infos: Mapping[str, GgufTensorInfo],
    form: WeightFormat,
) -> list[str]:
    """Return a sentence for each kind of conversion: tensors of several types that one weight joins
    get a common form, and quantised tensors become plain if they have none.
    """
    found: Counter[tuple[str, str]] = Counter()
    specs = model.weight_specs()
    for path, source in model.tensor_sources().items():
        given = [tensors[name] for name in source.names]
        if not any(isinstance(one, QuantizedTensor) for one in given):
            continue
        types = sorted({infos[one.name].type_name for one in given})
        stored = form.stored(path, specs[path])
        if not isinstance(stored, QuantizedArray):
            found[" and ".join(types), f"plain {form.dtype}"] += 1
        elif len(types) > 1:
            groups = f"{stored.method} with {stored.scales.spec.shape[-1]} groups"
            found[" and ".join(types), groups] += 1
    return [
        f"{types} are joined as {stored} in {count} of {len(specs)} weights"
        for (types, stored), count in sorted(found.items())
    ]
