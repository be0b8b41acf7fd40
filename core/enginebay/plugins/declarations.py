"""Checks declarations of plugins while their hooks are called, so that an error names the plugin.

Without these checks a mistake would surface only later, when the part is chosen.
"""

from __future__ import annotations

from enginebay.config_sections import AUTO
from enginebay.errors import PluginError, unknown_name
from enginebay.plugins import hooks
from enginebay.plugins.hooks import Declaration

READABLE = ("tool_calls", "reasoning")
"""What formats may read."""


def check_declaration(declaration: Declaration) -> None:
    """Raise PluginError for a declaration that would fail later, when the part is chosen."""
    name, op, target = declaration.name, declaration.op, declaration.target
    lists = (
        declaration.platforms,
        declaration.requires,
        declaration.capabilities.get("custom_calls", ()),
    )
    _check_capabilities(declaration)
    is_text = isinstance(name, str) and name.isprintable()
    is_name = is_text and name not in ("", AUTO) and not {"/", ":"} & set(name)
    is_target = isinstance(target, str) and ":" in target
    is_op = isinstance(op, str) and (declaration.kind == "kernel") == bool(op)
    are_lists = all(not isinstance(value, str) for value in lists)
    is_number = isinstance(declaration.capabilities.get("priority", 0), int)
    reads = declaration.capabilities.get("reads", ())
    tests = {
        "a name that is not auto and has no /, no : and no control characters": is_name,
        f'a target of the form "module:attribute", not {target!r}': is_target,
        f"an op for a kernel, and none for another kind, not {op!r}": is_op,
        "tuples for platforms, requires and custom_calls, not a single string": are_lists,
        "a whole number for the capability priority": is_number,
        f"a tuple of {', '.join(READABLE)} or both for the capability reads, not {reads!r}": (
            declaration.kind != "format" or _is_readable(reads)
        ),
    }
    for allowed, is_right in tests.items():
        if not is_right:
            todo = f"Correct {hooks.hook_name(declaration.kind)} of the plugin."
            raise PluginError(f"{declaration.kind} {name!r}", allowed, todo)


def _is_readable(reads: object) -> bool:
    """Return whether a format may declare that it reads this."""
    return isinstance(reads, tuple | list) and bool(reads) and all(one in READABLE for one in reads)


def _check_capabilities(declaration: Declaration) -> None:
    """Raise PluginError for an unknown capability: a misspelt one would be ignored silently."""
    what = f"{declaration.kind} {declaration.name!r}"
    known = ("priority", *hooks.CAPABILITIES.get(declaration.kind, ()))
    for capability in declaration.capabilities:
        if capability not in known and "." not in capability:
            todo = "Correct the name; a fact of the plugin's own has a dot, as in my_package.fact."
            raise PluginError(f"{what}: {unknown_name('capability', capability, known, todo)}")
