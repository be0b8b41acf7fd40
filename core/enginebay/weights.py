"""How the weights of a model are stored: as plain arrays or as quantised ones."""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """The shape of one weight, and the logical axis of each dimension (None: never sharded).

    `num_inputs`: the number of last dimensions that the ops linear and embedding treat as inputs; a
    weight with it may be quantised. None: another op reads the weight, which is never quantised.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    num_inputs: int | None = None


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """Shape, axes and dtype of one stored array: a plain weight, or an array of a quantised one."""

    spec: WeightSpec
    dtype: str


@functools.partial(
    tree_util.register_dataclass,
    data_fields=["values", "scales", "zero_points"],
    meta_fields=["method"],
)
@dataclasses.dataclass(frozen=True)
class QuantizedArray:
    """A quantised weight [*outputs, *inputs] = (values - zero_points) * scales. Only the ops
    linear, grouped_linear and embedding read its parts.

    values: [*outputs, *inputs] of a small dtype. scales: f32 [*outputs, groups]; each scale is for
    an equal share of the flattened inputs. zero_points: the same shape as scales, or None when all
    are 0. method: the registered name of the quantisation. In the plan of an engine the parts are
    StoredArrays, and NumPy arrays while a checkpoint is loaded.
    """

    values: Any
    scales: Any
    zero_points: Any | None
    method: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        shape: tuple[int, ...] = self.values.shape
        return shape

    @property
    def ndim(self) -> int:
        """Number of dimensions of the weight."""
        return len(self.shape)

    def dequantized(self) -> jax.Array:
        """Return the weight in f32."""
        shares = self.values.reshape(*self.scales.shape, -1).astype(jnp.float32)
        if self.zero_points is not None:
            shares = shares - self.zero_points[..., None].astype(jnp.float32)
        return (shares * self.scales[..., None]).reshape(self.shape)


Weight = jax.Array | QuantizedArray


class Quantization(ABC):
    """A method that stores weights in fewer bits. A plugin registers a subclass as kind
    "quantization"; its constructor takes no arguments.

    Rows along the first axis of a weight are quantised independently of one another, and each array
    of the result has the same first axis.
    """

    name: str

    @abstractmethod
    def arrays(self, spec: WeightSpec) -> QuantizedArray:
        """Return the StoredArrays for a weight, whose spec has `num_inputs`."""

    @abstractmethod
    def quantize(self, rows: np.ndarray, num_inputs: int) -> QuantizedArray:
        """Quantise some rows of a weight, f32 [rows, *outputs, *inputs], all finite. Returns NumPy
        arrays.
        """


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """How an engine stores its weights: the dtype of plain arrays, and the quantisation of weights
    that may be quantised (None: no weight is quantised).
    """

    dtype: str
    quantization: Quantization | None = None

    def __str__(self) -> str:
        return self.dtype if self.quantization is None else f"{self.quantization.name} {self.dtype}"

    def stored(self, spec: WeightSpec) -> StoredArray | QuantizedArray:
        """Return how a weight is stored: one StoredArray, or a QuantizedArray of StoredArrays."""
        if self.quantization is None or spec.num_inputs is None:
            return StoredArray(spec, self.dtype)
        return self.quantization.arrays(spec)


def stored_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Return the bytes that an array uses on a device. A device packs two int4 into one byte, while
    `nbytes` counts a byte for each.
    """
    return -(-math.prod(shape) * jax.dtypes.itemsize_bits(jnp.dtype(dtype)) // 8)
