"""The quantisation fp8: a byte per value with 3 bits of mantissa, and one scale per output."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from enginebay.weights import Quantization, QuantizedArray, WeightSpec
from enginebay_models.quantized_tensors import QuantizedForm

LARGEST = float(jnp.finfo(jnp.float8_e4m3fn).max)
FORM = QuantizedForm("fp8")


class Fp8(Quantization):
    """Rounds to float8_e4m3fn, after the largest absolute value of an output is scaled to the
    largest number of the dtype (448).

    The error of a value is at most 1/16 of it, and so 16 times that of int8 for large values and
    smaller for small ones.
    """

    def arrays(self, spec: WeightSpec) -> QuantizedArray | None:
        return FORM.arrays(spec)

    def quantize(self, rows: np.ndarray, arrays: QuantizedArray) -> QuantizedArray:
        flat = rows.reshape(*rows.shape[: len(arrays.scales.spec.shape) - 1], -1)
        scales = (np.abs(flat).max(axis=-1, keepdims=True) / LARGEST).astype(np.float32)
        values = (flat / np.where(scales > 0, scales, 1)).clip(-LARGEST, LARGEST)
        return QuantizedArray(
            values.astype(jnp.float8_e4m3fn).reshape(rows.shape), scales, None, FORM.method
        )
