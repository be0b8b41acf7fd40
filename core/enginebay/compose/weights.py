"""Choosing how the weights are stored."""

from __future__ import annotations

from enginebay.config import NO_QUANTIZATION, EngineConfig
from enginebay.errors import UnsupportedError
from enginebay.model import Model
from enginebay.registry import Registry
from enginebay.weights import Quantization, WeightFormat


def choose_weight_format(
    registry: Registry, config: EngineConfig, model: Model, dtype: str
) -> WeightFormat:
    """The format of `config`, with weights of `dtype`. UnknownNameError for a method that is not
    registered, UnsupportedError for a model without a weight that it applies to.
    """
    if config.quantization == NO_QUANTIZATION:
        return WeightFormat(dtype)
    entry = registry.find("quantization", config.quantization)
    quantization: Quantization = registry.load(entry)()
    if all(spec.num_inputs is None for spec in model.weight_specs().values()):
        raise UnsupportedError(
            f"quantization = {config.quantization!r} for a model of family "
            f"{model.info.family!r}, no weight of which says its `num_inputs`",
            "models that say so for weights that ops read in fewer bits",
            "Leave it out.",
        )
    return WeightFormat(dtype, quantization)
