"""How the weights of a model are stored, as plain arrays or as quantised ones, and how weights are
replaced by path.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from enginebay.errors import InputError

KEY_CENTERS: Final = "key_centers."
"""How the paths of weights begin that a quantised cache subtracts from keys."""

FLOAT: Final = "float"
"""`QuantizedArray.activations` of a weight whose inputs are not rounded."""


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """The shape of one weight, and the logical axis of each dimension (None: never sharded).

    `num_inputs`: the number of last dimensions that the ops linear and embedding treat as inputs; a
    weight with it may be quantised. None: another op reads the weight, which is never quantised.
    `dtype`: that of a plain array of the weight; None: that of all weights.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    num_inputs: int | None = None
    dtype: str | None = None


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """Shape, axes and dtype of one stored array: a plain weight, or an array of a quantised one."""

    spec: WeightSpec
    dtype: str


@functools.partial(
    tree_util.register_dataclass,
    data_fields=["values", "scales", "zero_points"],
    meta_fields=["method", "activations"],
)
@dataclasses.dataclass(frozen=True)
class QuantizedArray:
    """A quantised weight [*outputs, *inputs] = (values - zero_points) * scales. Only the ops
    linear, grouped_linear and embedding read its parts.

    values: [*outputs, *inputs] of a small dtype. scales: [*outputs, groups]; each scale is for an
    equal share of the flattened inputs, that is for consecutive inputs. zero_points: the shape and
    dtype of scales, or None when all are 0. method: the name of the form of the numbers, which the
    capability `quantizations` of a kernel lists; docs/quantization.md describes the built-in ones.
    activations: "int8" where the ops linear and grouped_linear round each row of their inputs to
    int8, with one scale for the row, before the product; "int8_group" with a scale for each group
    of 32 inputs of a row; FLOAT where they do not round. In the plan of an
    engine the parts are StoredArrays, and NumPy arrays while a checkpoint is loaded.
    """

    values: Any
    scales: Any
    zero_points: Any | None
    method: str
    activations: str = FLOAT

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
        *outputs, groups = self.scales.shape
        of_a_group = math.prod(self.shape[len(outputs) :]) // groups  # also where there is no row
        shares = self.values.reshape(*self.scales.shape, of_a_group).astype(jnp.float32)
        if self.zero_points is not None:
            shares = shares - self.zero_points[..., None].astype(jnp.float32)
        return (shares * self.scales[..., None].astype(jnp.float32)).reshape(self.shape)


Weight = jax.Array | QuantizedArray


class Quantization(ABC):
    """Stores weights in fewer bits while a checkpoint is loaded. A plugin registers a subclass as
    kind "quantization"; its constructor takes the options, if the plugin declares some.

    Rows along the first axis of a weight are quantised independently of one another, and each array
    of the result has the same first axis.
    """

    @abstractmethod
    def arrays(self, spec: WeightSpec) -> QuantizedArray | None:
        """Return the StoredArrays for a weight, whose spec has `num_inputs`; None: the weight is
        not quantised.
        """

    @abstractmethod
    def quantize(self, rows: np.ndarray, arrays: QuantizedArray) -> QuantizedArray:
        """Quantise some rows of a weight, f32 [rows, *outputs, *inputs], all finite. `arrays`: the
        result of `arrays` for the weight. Returns NumPy arrays.
        """


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """How an engine stores its weights.

    dtype: of plain arrays whose WeightSpec has none. quantized: the StoredArrays of each quantised
    weight, by path. name: the quantisation that they are stored by, "none" without one.
    quantization: quantises them while a checkpoint is loaded; None: the checkpoint itself stores
    them so.
    """

    dtype: str
    quantized: Mapping[str, QuantizedArray] = dataclasses.field(default_factory=dict)
    name: str = "none"
    quantization: Quantization | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}" if self.quantized else self.dtype

    def stored(self, path: str, spec: WeightSpec) -> StoredArray | QuantizedArray:
        """Return how a weight is stored: one StoredArray, or a QuantizedArray of StoredArrays."""
        return self.quantized.get(path) or StoredArray(spec, spec.dtype or self.dtype)

    @property
    def needs(self) -> Mapping[str, frozenset[str]]:
        """What kernels that read weights must support, by capability."""
        weights = self.quantized.values()
        return {
            "quantizations": frozenset(one.method for one in weights),
            "activation_quantizations": frozenset(one.activations for one in weights) - {FLOAT},
        }


def stored_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Return the bytes that an array uses on a device. A device packs two int4 into one byte, while
    `nbytes` counts a byte for each.
    """
    return -(-math.prod(shape) * jax.dtypes.itemsize_bits(jnp.dtype(dtype)) // 8)


def merge_weights(base: Mapping[str, Weight], *changes: Any) -> Mapping[str, Weight]:
    """`base` with the values of `changes`: mappings from dotted paths, or nested mappings (an
    nnx.State).

    The new values get the shardings of `base`. InputError for a weight that the model does not
    have, or of another shape or dtype, because the compiled programs accept only these. Centres of
    keys that the model does not have are left out: they belong to the cache of another engine.
    """
    own = flat_weights(base)
    leaves = [leaf for change in changes if change is not None for leaf in _flatten(change)]
    named = {path: x for path, x in leaves if path in own or not path.startswith(KEY_CENTERS)}
    for path, value in named.items():
        if path not in own and path not in base:
            raise InputError(
                f"weight {path!r}",
                f"the model's own: {', '.join(sorted(own)[:3])}, ...",
                "Rename or remove this weight.",
            )
        if not isinstance(value, jax.Array | np.ndarray):
            raise InputError(
                f"weight {path!r} of type {type(value).__name__}",
                "an array",
                "Convert it to an array.",
            )
        given, allowed = _describe(value), _describe(own.get(path, base.get(path)))
        if given != allowed:
            raise InputError(
                f"weight {path!r} as {given}", allowed, "Convert it to this shape and dtype."
            )
    placed = {path: _place(value, own[path]) for path, value in named.items()}
    if not placed:
        return base
    return {path: _changed(path, weight, placed) for path, weight in base.items()}


def flat_weights(weights: Mapping[str, Weight]) -> dict[str, jax.Array]:
    """Every array by its path. A quantised weight has "PATH.values", "PATH.scales" and, if it has
    zero points, "PATH.zero_points".
    """
    return {
        name: array for path, weight in weights.items() for name, array in _arrays(path, weight)
    }


def _arrays(path: str, weight: Any) -> list[tuple[str, Any]]:
    if not isinstance(weight, QuantizedArray):
        return [(path, weight)]
    names = ("values", "scales", "zero_points")
    found = [(f"{path}.{name}", getattr(weight, name)) for name in names]
    return [(name, array) for name, array in found if array is not None]


def _changed(path: str, weight: Weight, placed: Mapping[str, jax.Array]) -> Weight:
    """A weight with its arrays from `placed`; the same object when none is in it."""
    if not isinstance(weight, QuantizedArray):
        return placed.get(path, weight)
    mine: dict[str, Any] = {
        name.rpartition(".")[2]: placed[name] for name, _ in _arrays(path, weight) if name in placed
    }
    return dataclasses.replace(weight, **mine) if mine else weight


def _describe(weight: Any) -> str:
    if not isinstance(weight, QuantizedArray):
        return f"{weight.dtype}{list(weight.shape)}"
    return f"a QuantizedArray by {weight.method} of {list(weight.shape)}"


def _place(value: Any, like: jax.Array) -> jax.Array:
    if isinstance(value, jax.Array) and value.sharding == like.sharding:
        return value
    return jax.device_put(value, like.sharding)


def _flatten(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    from flax import nnx

    if isinstance(tree, nnx.State):
        tree = nnx.to_pure_dict(tree)
    if isinstance(tree, nnx.Variable):
        tree = tree.get_value()
    if isinstance(tree, Mapping):
        return [
            leaf
            for key, value in tree.items()
            for leaf in _flatten(value, f"{prefix}.{key}" if prefix else str(key))
        ]
    return _arrays(prefix, tree)
