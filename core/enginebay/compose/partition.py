"""Splits calls of ops over devices, by the partition rule of each op."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from enginebay.contracts.cache import CacheArrays
from enginebay.contracts.model import Embeddings, Model, ModelCache, TensorSource, Weights
from enginebay.contracts.placement import Placement
from enginebay.ops.bound import Ops
from enginebay.ops.op import Op
from enginebay.ops.partition_rules import NamedWeight, Partition, Shards
from enginebay.ops.spec import AttnBatch, StepBatch
from enginebay.plugins.registry import import_target
from enginebay.weights import QuantizedArray, WeightSpec

MeshAxes = dict[str, str | None]
"""Name of a dimension in a partition rule -> mesh axis; None or absent: the dimension is not
split.
"""


def partitioned(
    op: Op[Any], implementation: Any, collectives: Mapping[str, Any], placement: Placement
) -> Callable[..., Any]:
    """Return a function that runs the implementation on each device's part of the arguments, by the
    partition rule of the op. Without a rule, XLA's compiler splits the call.
    """
    mesh = placement.mesh
    assert mesh is not None, "calls are split over the devices of a mesh"
    rule_of = op.partition and import_target(op.partition, f"the partition rule of op {op.name!r}")

    def call(*arguments: Any, **keywords: Any) -> Any:
        plain = [a.weight if isinstance(a, NamedWeight) else a for a in arguments]
        if not rule_of:
            return implementation(*plain, **keywords)
        rule: Partition = rule_of(implementation, *plain, **keywords)
        arrays = [array for array in plain if array is not None]
        for given in (keywords[name] for name in rule.keywords):
            of_step = isinstance(given, StepBatch)
            arrays += [given.rows, given.positions] if of_step else [given]
        names = [text.split() for text in rule.inputs]
        split = _by_name(names, arrays, placement)
        for of_weight, weight in zip(names, (a for a in arguments if a is not None), strict=False):
            if isinstance(weight, NamedWeight):
                split |= zip(of_weight, placement.spec(weight.axes), strict=True)
        specs = [_spec(n, array, split, mesh) for n, array in zip(names, arrays, strict=True)]
        if not any(split.values()) or None in specs:
            return implementation(*plain, **keywords)
        return _sharded(rule, specs, split, collectives[rule.reduction], mesh)(*arrays)

    return call


def _by_name(
    names: Sequence[Sequence[str]], arrays: Sequence[Any], placement: Placement
) -> MeshAxes:
    """Return the mesh axis of each dimension that is a logical axis and that divides evenly."""
    sizes: dict[str, set[int]] = {}
    for of_array, array in zip(names, arrays, strict=True):
        for name, size in zip(of_array, array.shape, strict=True):
            sizes.setdefault(name, set()).add(size)
    return {
        name: placement.rules.get(name)
        for name, found in sizes.items()
        if not any(size % placement.num_shards(name) for size in found)
    }


def _spec(names: Sequence[str], array: Any, split: MeshAxes, mesh: Mesh) -> Any:
    """Return the partition of an array, or of the arrays of a quantised weight; None where a group
    of inputs would be split over two devices.
    """
    axes = [split.get(name) for name in names]
    if not isinstance(array, QuantizedArray):
        return PartitionSpec(*axes)
    outputs, groups = array.scales.ndim - 1, array.scales.shape[-1]
    first, *others = axes[outputs:]
    if groups > 1 and (any(others) or (first and groups % mesh.shape[first])):
        return None
    factors = PartitionSpec(*axes[:outputs], first if groups > 1 else None)
    points = None if array.zero_points is None else factors
    values = PartitionSpec(*axes)
    return QuantizedArray(values, factors, points, array.method, array.activations)


def _sharded(
    rule: Partition, specs: Sequence[Any], split: MeshAxes, collective: Any, mesh: Mesh
) -> Callable[..., Any]:
    axes = tuple(dict.fromkeys(axis for name in rule.reduced if (axis := split.get(name))))
    shards = Shards(axes, math.prod(mesh.shape[axis] for axis in axes), collective)
    outputs = tuple(PartitionSpec(*map(split.get, names.split())) for names in rule.outputs)
    sharded = jax.shard_map(
        functools.partial(rule.run, shards),
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=outputs if len(outputs) > 1 else outputs[0],
        check_vma=False,
    )
    if rule.size is None:
        return sharded
    return lambda *arrays: jax.tree.map(lambda out: out[: rule.size], sharded(*arrays))


def split_model(model: Model, placement: Placement) -> Model:
    """Return the model for a mesh: it passes weights to ops as NamedWeights, with their axes."""
    return model if placement.mesh is None else _SplitModel(model)


class _SplitModel(Model):
    def __init__(self, model: Model) -> None:
        self._model, self.info = model, model.info
        self._specs = model.weight_specs()

    def weight_specs(self) -> dict[str, WeightSpec]:
        return dict(self._specs)

    def tensor_sources(self) -> dict[str, TensorSource]:
        return self._model.tensor_sources()

    def hidden(
        self,
        weights: Weights,
        ops: Ops,
        token_ids: jax.Array,
        cache: ModelCache,
        batches: Mapping[str, AttnBatch],
        embeds: Embeddings | None = None,
    ) -> tuple[jax.Array, dict[str, tuple[CacheArrays, ...]]]:
        return self._model.hidden(self._named(weights), ops, token_ids, cache, batches, embeds)

    def logits(self, weights: Weights, ops: Ops, hidden: jax.Array) -> jax.Array:
        return self._model.logits(self._named(weights), ops, hidden)

    def _named(self, weights: Weights) -> Any:
        return {
            path: weight
            if self._specs[path].num_inputs is None
            else NamedWeight(weight, self._specs[path].axes)
            for path, weight in weights.items()
        }
