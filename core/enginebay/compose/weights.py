"""Chooses how the weights are stored."""

from __future__ import annotations

from enginebay.config import NO_QUANTIZATION, EngineConfig
from enginebay.errors import UnsupportedError
from enginebay.model import Model
from enginebay.registry import Registry
from enginebay.weights import Quantization, WeightFormat


def choose_weight_format(
    registry: Registry, config: EngineConfig, model: Model, dtype: str
) -> WeightFormat:
    """Return the weight format of a configuration, with plain weights of `dtype`. UnknownNameError
    for an unknown method; UnsupportedError for a model without weights that may be quantised.
    """
    if config.quantization == NO_QUANTIZATION:
        return WeightFormat(dtype)
    entry = registry.find("quantization", config.quantization)
    quantization: Quantization = registry.load(entry)()
    if all(spec.num_inputs is None for spec in model.weight_specs().values()):
        raise UnsupportedError(
            f"quantization = {config.quantization!r} for a model of family "
            f"{model.info.family!r}, none of whose weights has `num_inputs`",
            "a model whose family sets num_inputs of the weights that may be quantised",
            "Leave --quantization out.",
        )
    return WeightFormat(dtype, quantization)
