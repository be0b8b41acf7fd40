"""Which weights of a model may have adapters, and how a checkpoint's layers lie in them.

A weight of the model may be made of several linear layers of the checkpoint: q, k and v are one
weight. Each of them is a LayerPart with an adapter of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Self

import numpy as np

from enginebay.contracts.adapters import ADAPTER_WEIGHTS
from enginebay.contracts.model import Model, TensorSource
from enginebay.weights import WeightSpec

_PIECE = 1 << 22
"""Number of elements of a weight whose places are looked up at a time."""


@dataclasses.dataclass(frozen=True)
class LayerPart:
    """One linear layer of the checkpoint in a weight of the model.

    module: its name in the checkpoint, such as "model.layers.0.self_attn.q_proj". shape: (outputs,
    inputs) of its tensor. rows [*outputs of the part]: the row of the tensor at each output of the
    weight.
    """

    module: str
    shape: tuple[int, int]
    rows: np.ndarray


@dataclasses.dataclass(frozen=True)
class AdaptedLayer:
    """A weight with adapters: its parts, in order along dimension `axis` of the outputs.

    columns [*inputs]: the column of the parts' tensors at each input. a, b: the paths of the
    adapter weights, with `specs`: [slots, parts, rank, *inputs] and [slots, rank, *outputs].
    """

    axis: int
    parts: tuple[LayerPart, ...]
    columns: np.ndarray
    a: str
    b: str
    specs: tuple[WeightSpec, WeightSpec]

    @property
    def ends(self) -> tuple[int, ...]:
        """Where each part ends along dimension `axis` of the outputs."""
        return tuple(np.cumsum([part.rows.shape[self.axis] for part in self.parts]).tolist())

    def arrays(self, pairs: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, np.ndarray]:
        """Return the adapter weights of one slot, by path, for a [rank, inputs] and b [outputs,
        rank] of some of the parts, by module. Their rank is the largest rank of these parts.
        """
        rank = max(len(a) for a, _ in pairs.values())
        down = np.zeros((len(self.parts), rank, *self.columns.shape), np.float32)
        up = np.zeros((rank, *self.specs[1].shape[2:]), np.float32)
        first = 0
        for number, (part, end) in enumerate(zip(self.parts, self.ends, strict=True)):
            if part.module in pairs:
                a, b = pairs[part.module]
                where = (slice(len(a)), *(slice(None),) * self.axis, slice(first, end))
                down[number, : len(a)] = a[:, self.columns]
                up[where] = np.moveaxis(b[part.rows], -1, 0)
            first = end
        return {self.a: down, self.b: up}


@dataclasses.dataclass(frozen=True)
class AdaptedEmbedding:
    """An embedding with adapters. shape: (features, vocabulary).

    a, b: the paths of the adapter weights, with `specs`: [slots, vocabulary, rank] and [slots,
    rank, features].
    """

    parts: tuple[LayerPart]
    a: str
    b: str
    specs: tuple[WeightSpec, WeightSpec]

    @classmethod
    def of(cls, path: str, spec: WeightSpec, name: str, num_slots: int, rank: int) -> Self:
        """Return the slots of an embedding whose tensor has this name."""
        vocab, features = spec.shape
        part = LayerPart(name.removesuffix(".weight"), (features, vocab), np.arange(features))
        specs = (
            WeightSpec((num_slots, vocab, rank), (None, None, None)),
            WeightSpec((num_slots, rank, features), (None, None, None)),
        )
        return cls((part,), f"{ADAPTER_WEIGHTS}{path}.a", f"{ADAPTER_WEIGHTS}{path}.b", specs)

    def arrays(self, pairs: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, np.ndarray]:
        """Return the adapter weights of one slot, by path, for a [rank, vocabulary] and b
        [features, rank], by module.
        """
        a, b = pairs[self.parts[0].module]
        return {self.a: a.T, self.b: b.T}


Adapted = AdaptedLayer | AdaptedEmbedding
"""A weight of the model that may have adapters."""

HEAD = "lm_head"
"""Path of the head, a linear layer. Other weights of the vocabulary are embeddings."""


def adapted_layers(
    model: Model, num_slots: int, rank: int, targets: Collection[str] | None
) -> dict[str, Adapted]:
    """Return the weights that may have adapters, by path: those of linear layers in the layers of
    the model whose names end with one of `targets` (None: all), and the embedding and the head if
    `targets` has their names.
    """
    sources, found = model.tensor_sources(), dict[str, Adapted]()
    for path, spec in model.weight_specs().items():
        source = sources[path]
        leaves = {_leaf(name) for name in source.names}
        of_vocab = "vocab" in spec.axes
        if not _is_linear(spec, source) or not (
            not of_vocab if targets is None else leaves & set(targets)
        ):
            continue
        if of_vocab and path != HEAD:
            found[path] = AdaptedEmbedding.of(path, spec, source.names[0], num_slots, rank)
            continue
        layer = _layer(path, spec, source, num_slots, rank)
        if layer is not None:
            found[path] = layer
    return found


def _leaf(tensor: str) -> str:
    """Return "q_proj" for "model.layers.0.self_attn.q_proj.weight"."""
    return tensor.removesuffix(".weight").rpartition(".")[2]


def _is_linear(spec: WeightSpec, source: TensorSource) -> bool:
    """Whether a weight is a matrix, or several of them: one of a layer, an embedding or a head."""
    return (
        spec.num_inputs is not None
        and "expert" not in spec.axes
        and all(name.endswith(".weight") for name in source.names)
        and all(len(shape) == 2 for shape in source.shapes)
        and len({shape[1] for shape in source.shapes}) == 1
    )


def _layer(
    path: str, spec: WeightSpec, source: TensorSource, num_slots: int, rank: int
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
    if len(source.names) > 1 and spec.axes[axis] is not None:
        return None  # a device would have some of the parts only
    parts = []
    for number, (name, shape) in enumerate(zip(source.names, source.shapes, strict=True)):
        own = np.take(rows, np.flatnonzero(along[:, 0] == number), axis) - starts[number]
        parts.append(LayerPart(name.removesuffix(".weight"), (shape[0], shape[1]), own))
    specs = (
        WeightSpec(
            (num_slots, len(parts), rank, *columns.shape),
            (None, None, None, *spec.axes[num_outputs:]),
        ),
        WeightSpec((num_slots, rank, *rows.shape), (None, None, *spec.axes[:num_outputs])),
    )
    a, b = (f"{ADAPTER_WEIGHTS}{path}.{one}" for one in "ab")
    return AdaptedLayer(axis, tuple(parts), columns, a, b, specs)


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


def by_module(layers: Mapping[str, Adapted]) -> dict[str, LayerPart]:
    """Return all parts by the name of their layer in the checkpoint."""
    return {part.module: part for layer in layers.values() for part in layer.parts}
