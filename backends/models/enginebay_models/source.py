"""CheckpointSource: a checkpoint by name, path or hub id, with everything that an engine needs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from enginebay.contracts.model import Model, TokenInfo
from enginebay.weights import QuantizedArray, Weight, WeightFormat
from enginebay_models.checkpoint import (
    find_folder,
    find_tensors,
    read_architecture,
    read_config,
    read_token_info,
)
from enginebay_models.load import LoadProgress, Place, load_weights
from enginebay_models.quantized_tensors import Tensors, quantized_weights
from enginebay_models.sampling_defaults import read_sampling_defaults
from enginebay_models.stored_quantization import quantization_of, read_stored
from enginebay_models.text_part import COMPOSITE, text_config, text_tensors
from enginebay_models.token_count import count_token_ids


class CheckpointSource:
    """A Hugging Face checkpoint: "demo", a folder, or a hub id.

    Raises CheckpointError when it cannot be used.
    """

    def __init__(self, name_or_path: str) -> None:
        self.folder: Path = find_folder(name_or_path)
        self.config: Mapping[str, Any] = text_config(read_config(self.folder))
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
        return quantized_weights(model, self._tensors())

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
        stored = self._tensors()
        return load_weights(model, stored, form=form, place=place, verify=verify, progress=progress)

    def _tensors(self) -> Tensors:
        stored = find_tensors(self.folder)
        if self.architecture in COMPOSITE:
            stored = text_tensors(stored)
        return read_stored(self.config, stored)
