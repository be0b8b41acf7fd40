"""Which weights of a model may have adapters, and how a checkpoint's layers lie in them.

A weight of the model may be made of several linear layers of the checkpoint: q, k and v are one
weight. Each of them is a LayerPart with an adapter of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from enginebay.adapters import ADAPTER_WEIGHTS
from enginebay.model import Model, TensorSource
from enginebay.weights import WeightSpec

_PIECE = 1 << 22
"""Number of elements of a weight whose places are looked up at a time."""


@dataclasses.dataclass(frozen=True)
class LayerPart:
    """One linear layer of the checkpoint in a weight of the model.

    module: its name in the checkpoint, such as "model.layers.0.self_attn.q_proj". shape: (outputs,
    inputs) of its tensor. rows [*outputs of the part]: the row of the tensor at each output of the
    weight. columns [*inputs]: the column at each input. a, b: the paths of its adapter weights,
    with `specs`.
    """

    module: str
    shape: tuple[int, int]
    rows: np.ndarray
    columns: np.ndarray
    a: str
    b: str
    specs: tuple[WeightSpec, WeightSpec]

    def arrays(self, a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
        """Return the adapter weights of one slot for a [rank, inputs] and b [outputs, rank]."""
        rank = len(a)
        return {
            self.a: a[:, self.columns.reshape(-1)].reshape(rank, *self.columns.shape),
            self.b: b[self.rows.reshape(-1)].T.reshape(rank, *self.rows.shape),
        }


@dataclasses.dataclass(frozen=True)
class AdaptedLayer:
    """A weight with adapters: its parts, in order along dimension `axis` of the outputs."""

    axis: int
    parts: tuple[LayerPart, ...]


def adapted_layers(
    model: Model, num_slots: int, rank: int, targets: Collection[str] | None
) -> dict[str, AdaptedLayer]:
    """Return the weights that may have adapters, by path: those of linear layers in the layers of
    the model whose names end with one of `targets` (None: all).
    """
    sources, found = model.tensor_sources(), {}
    for path, spec in model.weight_specs().items():
        source = sources[path]
        if not _is_linear(spec, source):
            continue
        if targets is not None and not any(_leaf(name) in targets for name in source.names):
            continue
        layer = _layer(path, spec, source, (num_slots, rank))
        if layer is not None:
            found[path] = layer
    return found


def _leaf(tensor: str) -> str:
    """Return "q_proj" for "model.layers.0.self_attn.q_proj.weight"."""
    return tensor.removesuffix(".weight").rpartition(".")[2]


def _is_linear(spec: WeightSpec, source: TensorSource) -> bool:
    """Whether a weight is multiplied with hidden states of a layer, and read as matrices."""
    return (
        spec.num_inputs is not None
        and not {"vocab", "expert"} & set(spec.axes)
        and all(name.endswith(".weight") for name in source.names)
        and all(len(shape) == 2 for shape in source.shapes)
        and len({shape[1] for shape in source.shapes}) == 1
    )


def _layer(
    path: str, spec: WeightSpec, source: TensorSource, slots: tuple[int, int]
) -> AdaptedLayer | None:
    """Return the parts of a weight; None when they do not lie one after the other."""
    assert spec.num_inputs is not None, "only weights of linear layers have parts"
    num_outputs = len(spec.shape) - spec.num_inputs
    starts = np.cumsum([0, *(rows for rows, _ in source.shapes)])
    rows, columns = _places(spec, source, starts)
    owner = np.searchsorted(starts, rows, side="right") - 1
    for axis in range(num_outputs):
        along = np.moveaxis(owner, axis, 0).reshape(owner.shape[axis], -1)
        if (along == along[:, :1]).all() and (np.diff(along[:, 0]) >= 0).all():
            break
    else:
        return None
    parts = []
    for number, (name, shape) in enumerate(zip(source.names, source.shapes, strict=True)):
        own = np.take(rows, np.flatnonzero(along[:, 0] == number), axis) - starts[number]
        specs = (
            WeightSpec((*slots, *columns.shape), (None, None, *spec.axes[num_outputs:])),
            WeightSpec((*slots, *own.shape), (None, None, *spec.axes[:num_outputs])),
        )
        a, b = (f"{ADAPTER_WEIGHTS}{path}.{number}.{one}" for one in "ab")
        module = name.removesuffix(".weight")
        parts.append(LayerPart(module, (shape[0], shape[1]), own, columns, a, b, specs))
    return AdaptedLayer(axis, tuple(parts))


def _places(
    spec: WeightSpec, source: TensorSource, starts: Sequence[int] | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the row of the tensors, one after the other, at each output of a weight, and the
    column at each input. They are found by building the weight of arrays of numbers.
    """
    assert spec.num_inputs is not None, "only weights of linear layers have inputs"
    num_outputs = len(spec.shape) - spec.num_inputs
    whole = tuple(slice(0, size) for size in spec.shape[1:])
    row_numbers = [
        np.broadcast_to(np.arange(start, start + shape[0], dtype=np.int32)[:, None], shape)
        for start, shape in zip(starts, source.shapes, strict=False)
    ]
    step = max(1, _PIECE // math.prod(spec.shape[1:]))
    first = (0,) * spec.num_inputs
    pieces = [
        source.build(row_numbers, (slice(i, min(i + step, spec.shape[0])), *whole))[(..., *first)]
        for i in range(0, spec.shape[0], step)
    ]
    column_numbers = [
        np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape) for shape in source.shapes
    ]
    built = source.build(column_numbers, (slice(0, 1), *whole))
    return np.concatenate(pieces), built[(0,) * num_outputs].copy()


def by_module(layers: Mapping[str, AdaptedLayer]) -> dict[str, LayerPart]:
    """Return all parts by the name of their layer in the checkpoint."""
    return {part.module: part for layer in layers.values() for part in layer.parts}
