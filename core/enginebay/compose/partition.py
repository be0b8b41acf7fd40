"""Calls split over devices by their op's partition rule."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from enginebay.executor.sharding import Placement
from enginebay.ops.op import Op, Partition, Shards
from enginebay.ops.spec import StepBatch
from enginebay.registry import import_target

Axes = Mapping[str, Any]
"""The mesh axes that a dimension of the rule is split over, by its name."""


def partitioned(
    op: Op[Any],
    implementation: Any,
    collectives: Mapping[str, Any],
    placement: Placement,
    *,
    by_compiler: bool,
) -> Callable[..., Any]:
    """An implementation that runs on each device's part of the arguments, as the op's `partition`
    says.

    A rule with a logical axis is applied where the dimensions of this name divide by its mesh axis. How
    arguments are split under a rule without one is what the compiler finds in the program around the
    call; `by_compiler`: the implementation can be split without that.
    """
    rule_of = import_target(str(op.partition), f"the partition rule of op {op.name!r}")

    def call(*arguments: Any, **keywords: Any) -> Any:
        rule: Partition = rule_of(implementation, *arguments, **keywords)
        arrays = [array for array in arguments if array is not None]
        for given in (keywords[name] for name in rule.keywords):
            of_step = isinstance(given, StepBatch)
            arrays += [given.rows, given.positions] if of_step else [given]
        if rule.axis is not None and _divides(rule, arrays, placement):
            return _on_axis(rule, collectives[rule.reduction], placement)(*arrays)
        if rule.axis is not None or by_compiler:
            return implementation(*arguments, **keywords)
        return _as_compiled(rule, collectives[rule.reduction])(*arrays)

    return call


def _divides(rule: Partition, arrays: Sequence[Any], placement: Placement) -> bool:
    """Whether a call is split: its axis is, and every dimension of its name into equal parts."""
    count = placement.num_shards(rule.axis)
    return count > 1 and all(
        size % count == 0
        for names, array in zip(rule.inputs, arrays, strict=True)
        for name, size in zip(names.split(), array.shape, strict=True)
        if name == rule.axis
    )


def _on_axis(rule: Partition, collective: Any, placement: Placement) -> Callable[..., Any]:
    axis = placement.rules[str(rule.axis)]
    shards = Shards((str(axis),), placement.num_shards(rule.axis), collective)

    def place(names: str) -> PartitionSpec:
        # Arrays of a quantised weight have their first dimensions in common.
        places = [axis if name == rule.axis else None for name in names.split()]
        while places and places[-1] is None:
            places.pop()
        return PartitionSpec(*places)

    outputs = tuple(map(place, rule.outputs))
    sharded = jax.shard_map(
        functools.partial(rule.run, shards),
        mesh=placement.mesh,
        in_specs=tuple(map(place, rule.inputs)),
        out_specs=outputs if len(outputs) > 1 else outputs[0],
        check_vma=False,
    )
    if rule.size is None:
        return sharded
    return lambda *arrays: jax.tree.map(lambda out: out[: rule.size], sharded(*arrays))


def _as_compiled(rule: Partition, collective: Any) -> Any:
    inputs, outputs = ([names.split() for names in side] for side in (rule.inputs, rule.outputs))
    summed = {name for names in inputs for name in names} - {n for names in outputs for n in names}

    def partition(mesh: Mesh, arguments: Sequence[Any], results: Any) -> Any:
        split = _axes(rule, inputs, arguments)
        reduced = tuple(axis for name in summed for axis in _listed(split.get(name)))
        shards = Shards(reduced, math.prod(mesh.shape[axis] for axis in reduced), collective)

        def place(names: Sequence[str]) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(split.get(name) for name in names)))

        placed = jax.tree.unflatten(jax.tree.structure(results), map(place, outputs))
        return mesh, functools.partial(rule.run, shards), placed, tuple(map(place, inputs))

    whole = custom_partitioning(functools.partial(rule.run, Shards((), 1, collective)))
    whole.def_partition(
        partition=partition,
        sharding_rule=f"{', '.join(rule.inputs)} -> {', '.join(rule.outputs)}",
        need_replication_factors=rule.whole,
    )
    return whole


def _axes(rule: Partition, inputs: Sequence[Sequence[str]], arguments: Sequence[Any]) -> Axes:
    """Which mesh axes split each dimension. An axis splits one dimension, that of the largest array
    which has it.
    """
    split: dict[str, Any] = {}
    used: set[str] = set()
    for names, array in sorted(zip(inputs, arguments, strict=True), key=lambda p: -p[1].size):
        for name, axis in zip(names, array.sharding.spec, strict=False):
            mine = set(_listed(axis))
            if mine and name not in split and name not in rule.whole and not mine & used:
                split[name] = axis
                used |= mine
    return split


def _listed(axis: Any) -> tuple[str, ...]:
    """The mesh axes of an entry of a PartitionSpec."""
    return () if axis is None else axis if isinstance(axis, tuple) else (axis,)
