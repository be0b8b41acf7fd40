"""The quantisation method int8: one byte per value and one scale per output channel."""

from __future__ import annotations

import numpy as np

from enginebay.weights import Quantization, QuantizedArray, WeightSpec
from enginebay_models.quantized_tensors import QuantizedForm

LARGEST = 127
"""Largest value. Values are symmetric around 0, so -128 is not used."""

FORM = QuantizedForm("int8")


class Int8(Quantization):
    """Rounds to the nearest of 255 values, symmetric around 0.

    The error is at most half a scale, that is 1/254 of the channel's largest absolute value.
    """

    def arrays(self, spec: WeightSpec) -> QuantizedArray:
        return FORM.arrays(spec)

    def quantize(self, rows: np.ndarray, arrays: QuantizedArray) -> QuantizedArray:
        flat = rows.reshape(*rows.shape[: len(arrays.scales.spec.shape) - 1], -1)
        largest = np.abs(flat).max(axis=-1, keepdims=True)
        scales = (largest / LARGEST).astype(np.float32)
        values = np.rint(flat / np.where(scales > 0, scales, 1)).clip(-LARGEST, LARGEST)
        return QuantizedArray(values.astype(np.int8).reshape(rows.shape), scales, None, "int8")
