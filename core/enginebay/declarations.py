"""What plugins declare, looked at while their hooks are called: a mistake is reported there, with
the plugin's name, and not far from it when a part is picked.
"""

from __future__ import annotations

from enginebay import hooks
from enginebay.config_sections import AUTO
from enginebay.errors import PluginError, unknown_name
from enginebay.hooks import Declaration


def collector(kind: str, into: list[Declaration]) -> hooks.Register:
    """The callback of a kind's hook, which appends each declaration to `into`; PluginError for one
    that the host could not work with.
    """

    def take(declaration: Declaration) -> None:
        _check(declaration)
        into.append(declaration)

    return hooks.Register(kind, take)


def _check(declaration: Declaration) -> None:
    """PluginError for what the host could not work with later: it would fail far from the
    plugin.
    """
    name, op, target = declaration.name, declaration.op, declaration.target
    lists = (
        declaration.platforms,
        declaration.requires,
        declaration.capabilities.get("custom_calls", ()),
    )
    _check_names(declaration)
    tests = (
        (
            isinstance(name, str)
            and name not in ("", AUTO)
            and name.isprintable()
            and not {"/", ":"} & set(name),
            "a name without / and : and control characters, not auto",
        ),
        (
            isinstance(target, str) and ":" in target,
            f'"module:attribute" for a target, not {target!r}',
        ),
        (
            isinstance(op, str) and (declaration.kind == "kernel") == bool(op),
            f"an op for kernels only, not {op!r}",
        ),
        (
            all(not isinstance(value, str) for value in lists),
            "tuples for platforms, requires and custom_calls, not one text",
        ),
        (
            isinstance(declaration.capabilities.get("priority", 0), int),
            "a whole number for the priority",
        ),
    )
    for is_right, allowed in tests:
        if not is_right:
            raise PluginError(f"{declaration.kind} {name!r}", allowed, "Correct the plugin.")


def _check_names(declaration: Declaration) -> None:
    """PluginError for a capability that nothing asks for: a misspelt one would be ignored without a
    word.
    """
    what = f"{declaration.kind} {declaration.name!r}"
    known = hooks.CAPABILITIES.get(declaration.kind, ())
    for capability in declaration.capabilities:
        if capability not in known and "." not in capability:
            todo = "Correct the plugin, or write a fact of its own with a dot: my_package.fact."
            raise PluginError(f"{what}: {unknown_name('capability', capability, known, todo)}")
