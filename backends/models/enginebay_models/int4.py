"""The quantisation int4: half a byte per value, with a scale for each group of inputs."""

from __future__ import annotations

import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from enginebay.weights import Quantization, QuantizedArray, WeightSpec
from enginebay_models.int8 import Int8
from enginebay_models.quantized_tensors import QuantizedForm

LOW, HIGH = -8, 7
"""Smallest and largest value."""

_BLOCK = 1 << 14
# Numbers that are quantised at once: they stay in a processor's cache.

GROUP_SIZES = (128, 64, 32)

SHRINKS = (1.0, 0.9)
"""Tried multiples of the scale that keeps the number of largest magnitude exact."""


class Int4Options(BaseModel):
    """Options of the quantisation int4."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    group_size: Literal[32, 64, 128] = Field(
        32, description="most inputs that share a scale; fewer are more exact, and take more bytes"
    )


class Int4(Quantization):
    """Rounds to the nearest of 16 values, with a scale for each group of consecutive inputs.

    The number of largest magnitude in a group becomes -8 or is cut to it. For each of SHRINKS, the
    group is rounded, and rounded again with the scale that fits the first values best by least
    squares; the result with the least squared error is taken. A weight whose inputs are no multiple
    of the group size has smaller groups. Embedding and head, and weights whose inputs are no
    multiple of 32, are quantised to int8: 4 bits in the head change the probabilities of tokens
    most.
    """

    def __init__(self, options: Int4Options) -> None:
        self.group_size = options.group_size
        self.int8 = Int8()

    def arrays(self, spec: WeightSpec) -> QuantizedArray | None:
        assert spec.num_inputs is not None, "the weight of another op is not quantised"
        num_in = math.prod(spec.shape[len(spec.shape) - spec.num_inputs :])
        sizes = [size for size in GROUP_SIZES if size <= self.group_size and num_in % size == 0]
        if "vocab" in spec.axes or not sizes:
            return self.int8.arrays(spec)
        return QuantizedForm("int4", num_in // sizes[0], "float16").arrays(spec)

    def quantize(self, rows: np.ndarray, arrays: QuantizedArray) -> QuantizedArray:
        if arrays.method != "int4":
            return self.int8.quantize(rows, arrays)
        groups = arrays.scales.spec.shape[-1]
        outputs = rows.shape[: len(arrays.scales.spec.shape) - 1]
        shares = rows.reshape(-1, rows.size // (math.prod(outputs) * groups))
        values, scales = np.empty(shares.shape, np.int8), np.empty(len(shares), np.float16)
        step = max(1, _BLOCK // shares.shape[1])
        for first in range(0, len(shares), step):
            some = slice(first, first + step)
            values[some], scales[some] = _best(shares[some])
        return QuantizedArray(
            values.astype(jnp.int4).reshape(rows.shape),
            scales.reshape(*outputs, groups),
            None,
            "int4",
        )


def _best(shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (values [n, size], scales [n]) of groups [n, size]."""
    at = np.abs(shares).argmax(axis=1)[:, None]
    widest = np.take_along_axis(shares, at, axis=1) / LOW
    best = _fitted(shares, widest)
    for shrink in SHRINKS[1:]:
        tried = _fitted(shares, widest * np.float32(shrink))
        better = tried[2] < best[2]
        best = tuple(np.where(better, new, old) for new, old in zip(tried, best, strict=True))
    return best[0], best[1][:, 0]


def _fitted(shares: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return what _rounded does, with the scales that fit the values of these scales best."""
    values, kept, _ = _rounded(shares, scales)
    products = np.einsum("ni,ni->n", shares, values)[:, None]
    squares = np.einsum("ni,ni->n", values, values)[:, None]
    return _rounded(shares, np.divide(products, squares, out=kept, where=squares != 0))


def _rounded(shares: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return (values, f32 scales as float16 holds them, squared error of each group)."""
    most = float(np.finfo(np.float16).max)
    kept = scales.clip(-most, most).astype(np.float16).astype(np.float32)
    values = shares * np.divide(1, kept, out=np.zeros_like(kept), where=kept != 0)
    np.rint(values, out=values)
    np.clip(values, LOW, HIGH, out=values)
    error = values * kept
    error -= shares
    return values, kept, np.einsum("ni,ni->n", error, error)[:, None]
