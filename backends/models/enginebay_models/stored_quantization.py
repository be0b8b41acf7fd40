"""Finds how a checkpoint is quantised, from quantization_config in its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from enginebay.config import NO_QUANTIZATION
from enginebay_models.awq import read_awq
from enginebay_models.compressed_tensors import read_compressed_tensors
from enginebay_models.gptq import read_gptq
from enginebay_models.packed import Stored, refused
from enginebay_models.quantized_tensors import Tensors

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
