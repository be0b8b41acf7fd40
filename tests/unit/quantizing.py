"""Weights that tests quantise."""

from __future__ import annotations

import numpy as np

from enginebay.weights import Quantization, QuantizedArray, WeightSpec
from enginebay_models.int8 import Int8


def quantized(
    rows: np.ndarray, num_inputs: int = 1, by: Quantization | None = None
) -> QuantizedArray:
    """The rows of a weight, quantised on one device."""
    spec, method = WeightSpec(rows.shape, (None,) * rows.ndim, num_inputs), by or Int8()
    arrays = method.arrays(spec)
    assert arrays is not None
    return method.quantize(rows, arrays)
