"""How a model's weights are stored: plain arrays, or quantised ones and the methods that make
them.
"""

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
    """One array of a model: its shape and the logical axis of each dimension (None: never sharded).

    `num_inputs` is how many last dimensions the ops linear and embedding take as a row's inputs:
    such a weight may be quantised. None: another op reads the weight, which stays a plain array.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    num_inputs: int | None = None


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """One array on the device, of a weight or of its quantised form."""

    spec: WeightSpec
    dtype: str


@functools.partial(
    tree_util.register_dataclass,
    data_fields=["values", "scales", "zero_points"],
    meta_fields=["method"],
)
@dataclasses.dataclass(frozen=True)
class QuantizedArray:
    """A weight [*outputs, *inputs] as (values - zero_points) * scales. Only the ops linear,
    grouped_linear and embedding look inside.

    values [*outputs, *inputs] of a small dtype. scales f32 and zero_points [*outputs, groups]:
    each belongs to an equal share of the flattened inputs. zero_points None: all are 0. `method`
    is the registered name of what made the array. The same record holds StoredArrays or NumPy
    arrays where these describe or make one.
    """

    values: Any
    scales: Any
    zero_points: Any | None
    method: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight that it stands for."""
        shape: tuple[int, ...] = self.values.shape
        return shape

    @property
    def ndim(self) -> int:
        """Dimensions of the weight that it stands for."""
        return len(self.shape)

    def dequantized(self) -> jax.Array:
        """The weight in f32."""
        shares = self.values.reshape(*self.scales.shape, -1).astype(jnp.float32)
        if self.zero_points is not None:
            shares = shares - self.zero_points[..., None].astype(jnp.float32)
        return (shares * self.scales[..., None]).reshape(self.shape)


Weight = jax.Array | QuantizedArray


@functools.partial(tree_util.register_dataclass, data_fields=["weight"], meta_fields=["axes"])
@dataclasses.dataclass(frozen=True)
class NamedWeight:
    """A weight with the logical axis of each dimension, as a model split over devices passes it to
    ops; implementations are called with the weight itself.
    """

    weight: Weight
    axes: tuple[str | None, ...]


class Quantization(ABC):
    """A method of storing weights in fewer bits, registered as kind "quantization"; made with no
    arguments.

    Rows of the weight's first axis are quantised independently of one another, and the first axis
    of each array counts them.
    """

    name: str

    @abstractmethod
    def arrays(self, spec: WeightSpec) -> QuantizedArray:
        """The StoredArrays of a weight with `num_inputs`."""

    @abstractmethod
    def quantize(self, rows: np.ndarray, num_inputs: int) -> QuantizedArray:
        """The NumPy arrays of some rows of a weight, f32 and finite [rows, *outputs, *inputs]."""


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """How an engine stores its weights: the dtype of plain arrays, and the method of weights that
    may be quantised.
    """

    dtype: str
    quantization: Quantization | None = None

    def __str__(self) -> str:
        return self.dtype if self.quantization is None else f"{self.quantization.name} {self.dtype}"

    def stored(self, spec: WeightSpec) -> StoredArray | QuantizedArray:
        """What stands on the device for a weight: a StoredArray, or a QuantizedArray of them."""
        if self.quantization is None or spec.num_inputs is None:
            return StoredArray(spec, self.dtype)
        return self.quantization.arrays(spec)


def stored_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Bytes of an array as a device stores it: two int4 in a byte, where `nbytes` counts a byte
    for each.
    """
    kind = jnp.dtype(dtype)
    bits = 8 * kind.itemsize
    if jnp.issubdtype(kind, jnp.integer):
        bits = jnp.iinfo(kind).bits
    elif jnp.issubdtype(kind, jnp.floating):
        bits = jnp.finfo(kind).bits
    return -(-math.prod(shape) * bits // 8)
