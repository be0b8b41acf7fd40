"""Implementations that the compiler cannot split over devices, split by their op's own rule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from enginebay.ops.op import Op, Partition
from enginebay.registry import import_target

Axes = Mapping[str, Any]
"""The mesh axes that a dimension of the rule is split over, by its name."""


def partitioned(op: Op[Any], implementation: Any) -> Callable[..., Any]:
    """An implementation that runs on each device's part of the arguments, as the op's `partition`
    says. How the arguments are split is what the compiler finds in the program around the call.
    """
    rule_of = import_target(str(op.partition), f"the partition rule of op {op.name!r}")

    def call(*arguments: Any, **keywords: Any) -> Any:
        rule: Partition = rule_of(implementation, *arguments, **keywords)
        return _split(rule)(*(array for array in arguments if array is not None))

    return call


def _split(rule: Partition) -> Any:
    inputs, outputs = ([names.split() for names in side] for side in (rule.inputs, rule.outputs))
    summed = {name for names in inputs for name in names} - {n for names in outputs for n in names}

    def partition(mesh: Mesh, arguments: Sequence[Any], results: Any) -> Any:
        split = _axes(rule, inputs, arguments)
        reduced = tuple(axis for name in summed for axis in _listed(split.get(name)))

        def run(*arrays: jax.Array) -> Any:
            return rule.run(lambda x: jax.lax.psum(x, reduced) if reduced else x, *arrays)

        def place(names: Sequence[str]) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(split.get(name) for name in names)))

        placed = jax.tree.unflatten(jax.tree.structure(results), map(place, outputs))
        return mesh, run, placed, tuple(map(place, inputs))

    whole = custom_partitioning(functools.partial(rule.run, lambda x: x))
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
