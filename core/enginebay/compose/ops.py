"""The registered ops, as the choice of implementations needs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.config import Reason
from enginebay.errors import PluginError, unknown_name
from enginebay.ops.op import Op
from enginebay.registry import Entry, Registry

ATTENTION = "attention"
"""The op that is chosen by phase, together with the layout of the cache."""

NONE = "none"
"""How the record names the implementation of an op that has none here, since a plugin's op is
broken or no implementation of it can serve. Models that use the op cannot be served.
"""


def usable_ops(registry: Registry) -> tuple[dict[str, Op[Any]], list[Reason]]:
    """Every op that implementations can be chosen for, by name, and why others were left out."""
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
    raise PluginError(given, "an Op of the same name", "Mend the plugin.")


def _why_not_made_of(op: Op[Any], ops: Mapping[str, Op[Any]]) -> str | None:
    """What is wrong with the parts of a fused op, or None."""
    parts = [name for name, each in ops.items() if not each.made_of and name != ATTENTION]
    todo = "An op is made of ops that are not fused themselves. Mend the plugin."
    for part in op.made_of:
        if part not in parts:
            return str(unknown_name(f"part of op {op.name}", part, parts, todo))
    return None
