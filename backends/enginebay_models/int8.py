"""The quantisation method int8: one byte per value and one scale per output channel."""

from __future__ import annotations

import numpy as np

from enginebay.weights import Quantization, QuantizedArray, StoredArray, WeightSpec

LARGEST = 127
"""Largest value. Values are symmetric around 0, so -128 is not used."""


class Int8(Quantization):
    """Rounds to the nearest of 255 values, symmetric around 0.

    The error is at most half a scale, that is 1/254 of the channel's largest absolute value.
    """

    name = "int8"

    def arrays(self, spec: WeightSpec) -> QuantizedArray:
        assert spec.num_inputs is not None, "the weight of another op is not quantised"
        outputs = len(spec.shape) - spec.num_inputs
        scales = WeightSpec((*spec.shape[:outputs], 1), (*spec.axes[:outputs], None))
        return QuantizedArray(
            StoredArray(spec, "int8"), StoredArray(scales, "float32"), None, self.name
        )

    def quantize(self, rows: np.ndarray, num_inputs: int) -> QuantizedArray:
        flat = rows.reshape(*rows.shape[: rows.ndim - num_inputs], -1)
        largest = np.abs(flat).max(axis=-1, keepdims=True)
        scales = (largest / LARGEST).astype(np.float32)
        values = np.rint(flat / np.where(scales > 0, scales, 1)).clip(-LARGEST, LARGEST)
        return QuantizedArray(values.astype(np.int8).reshape(rows.shape), scales, None, self.name)
