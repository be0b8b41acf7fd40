"""Placement of a SampleState's arrays: rules map paths to logical axes, and the cache's layout sets
the order of the axes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec, Sharding

from enginebay.contracts.cache import KVLayout
from enginebay.contracts.placement import Placement
from enginebay.errors import ConfigError
from enginebay_shared.opening import Rules

VIEWS = "model_kwargs/past_key_values/views"
"""Path of the cache's layers within a state."""

VALUES = {"k": "key", "v": "value", "kv": "key_value"}
LEAF_NAMES = VALUES | {
    f"{array}_{ours}": f"{leaf}_{name}"
    for array, leaf in VALUES.items()
    for ours, name in (("scales", "scales"), ("zeros", "zero_points"))
}
"""Names in a state of the arrays of a layout, scales and zero points of quantised ones included."""


@dataclasses.dataclass(frozen=True)
class PartitionAxis:
    """The logical axis of each dimension of a generation. None: replicated on every device.

    Logical axes are those of the configuration (`axis_rules` maps them to mesh axes). The name of a
    mesh axis is allowed as well.
    """

    batch_axis: str | None = "batch"
    sequence_axis: str | None = None
    key_sequence_axis: str | None = None
    head_axis: str | None = "kv_heads"
    attention_dim_axis: str | None = None


def default_rules(axis: PartitionAxis) -> Rules:
    """Return the default rules of a state, quantised caches included. The first rule whose pattern
    occurs in a leaf's path applies.

    The spec of a cache leaf names (batch, key sequence, heads, head dimension), in this order for
    every layout.
    """
    tokens = PartitionSpec(axis.batch_axis, axis.sequence_axis)
    cache = PartitionSpec(
        axis.batch_axis, axis.key_sequence_axis, axis.head_axis, axis.attention_dim_axis
    )
    view = rf"{VIEWS}/[0-9]+/(key_value|key|value)"
    return (
        ("^(sequences|running_token)$", tokens),
        ("^model_kwargs/(attention_mask|position_ids)$", tokens),
        (f"^{view}/(scale|weight)$", cache),
        (f"^{view}/(packed|absmax)$", cache),
        (f"^{view}(_scales|_zero_points)?$", cache),
        (".*", PartitionSpec()),
    )


def leaf_path(keys: Sequence[Any]) -> str:
    """Return the path of a leaf, such as model_kwargs/past_key_values/views/0/key, from
    JAX's keys.
    """
    return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


def match_rule(rules: Rules, path: str) -> PartitionSpec:
    """Return the spec of the first rule that matches `path`. ConfigError when no rule matches."""
    for pattern, spec in rules:
        if re.search(pattern, path):
            return spec
    raise ConfigError(
        f"no partition rule matches {path!r}",
        "rules for every leaf",
        'Append (".*", PartitionSpec()) to the rules.',
    )


@dataclasses.dataclass(frozen=True)
class StatePlacement:
    """The sharding of each leaf of a state on an engine's mesh, by rules."""

    placement: Placement
    rules: Rules
    input_spec: PartitionSpec | None = None
    """Spec of token ids and masks; it overrides the rules."""

    def sharding(self, path: str, layout: KVLayout | None = None) -> Sharding:
        """Return the sharding of the leaf at `path`; `layout` is the layout of its cache group."""
        if self.placement.mesh is None:
            return self.placement.replicated
        spec = match_rule(self.rules, path)
        if self.input_spec is not None and path in ("sequences", "model_kwargs/attention_mask"):
            spec = self.input_spec
        names = list(spec)
        if layout is not None:
            names = _in_layout_order(names, layout, path.rpartition("/")[2])
        axes = [self._mesh_axis(name) for name in names]
        while axes and axes[-1] is None:
            axes.pop()
        return jax.sharding.NamedSharding(self.placement.mesh, PartitionSpec(*axes))

    def _mesh_axis(self, name: Any) -> Any:
        mesh = self.placement.mesh
        assert mesh is not None, "sharding() calls this only with a mesh"
        if name is None or name in mesh.shape:
            return name
        if isinstance(name, tuple):
            axes = tuple(a for a in map(self._mesh_axis, name) if a is not None)
            return axes or None
        if name in self.placement.rules:
            return self.placement.rules[name]
        known = sorted({*self.placement.rules, *mesh.shape})
        raise ConfigError(
            f"axis {name!r} in the partition rules", ", ".join(known), "Use one of these axes."
        )


def _in_layout_order(names: Sequence[Any], layout: KVLayout, leaf: str) -> list[Any]:
    """Reorder (batch, key sequence, heads, head dimension) to the axes of the layout's array."""
    array = next(name for name, called in LEAF_NAMES.items() if called == leaf)
    batch, length, heads, width = (*names, None, None, None, None)[:4]
    rank = len(layout.shapes()[array].shape)
    if not layout.logical_axes()[array]:
        heads = None
    order: dict[int, Any] = {
        0: batch,
        layout.offset_axis_of(array): length,
        layout.head_axis()[array]: heads,
    }
    if array in VALUES:  # scales have no axis for the values of a head
        order[rank - 1] = width
    return [order.get(axis) for axis in range(rank)]


def spec_to_plain(spec: PartitionSpec) -> list[Any]:
    """Return a spec as a list, for JSON."""
    return [list(a) if isinstance(a, tuple) else a for a in spec]


def spec_from_plain(plain: Sequence[Any]) -> PartitionSpec:
    """Return the spec that spec_to_plain() stored."""
    return PartitionSpec(*(tuple(a) if isinstance(a, list) else a for a in plain))
