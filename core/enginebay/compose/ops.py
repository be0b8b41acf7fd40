"""Loads and checks the registered ops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.config import Reason
from enginebay.errors import PluginError, unknown_name
from enginebay.ops.op import Op
from enginebay.plugins.registry import Entry, Registry

ATTENTION = "attention"
"""The op whose implementation is chosen by phase, together with the cache layout."""

NONE = "none"
"""The name in the record of an op that has no implementation here, because the op of a plugin is
broken, or because none of its implementations can be used. Models that need the op cannot be
served.
"""


def usable_ops(registry: Registry) -> tuple[dict[str, Op[Any]], list[Reason]]:
    """Return every usable op by name, and the reasons why other ops were left out."""
    ops: dict[str, Op[Any]] = {}
    refused = {}
    for entry in registry.entries:
        if entry.kind == "op" and entry.state == "ready":
            try:
                ops[entry.name] = _record(registry, entry)
            except PluginError as error:
                refused[entry.name] = str(error)
    refused |= {op.name: why for op in ops.values() if (why := _why_not_made_of(op, ops))}
    usable = {name: op for name, op in ops.items() if name not in refused}
    return usable, [Reason(f"kernels.{name}", NONE, why) for name, why in refused.items()]


def _record(registry: Registry, entry: Entry) -> Op[Any]:
    op = registry.load(entry)
    if isinstance(op, Op) and op.name == entry.name:
        return op
    given = f"op {entry.name!r} of plugin {entry.package!r} is {op!r}"
    raise PluginError(given, "an Op of the same name", "Fix register_ops of the plugin.")


def _why_not_made_of(op: Op[Any], ops: Mapping[str, Op[Any]]) -> str | None:
    """Return what is wrong with the parts of a fused op, or None."""
    parts = [name for name, each in ops.items() if not each.made_of and name != ATTENTION]
    todo = "Correct `made_of` of the op: its parts must be ops that are not fused."
    for part in op.made_of:
        if part not in parts:
            return str(unknown_name(f"part of op {op.name}", part, parts, todo))
    return None
