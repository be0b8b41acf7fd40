"""The section [serve] of a configuration file: what the flags of `serve` say, and several models,
each with its own engine settings.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from enginebay.errors import InputError, unknown_name

SECTION = "serve"
MODELS = "models"


class Repeated(argparse.Action):
    """A flag that may be repeated: its values form a list, in place of that of the file."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Add a value; the first one begins a new list."""
        before = getattr(namespace, self.dest)
        is_default = before is parser.get_default(self.dest)
        setattr(namespace, self.dest, [*([] if is_default else before), values])


def flag_defaults(file: Mapping[str, Any], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the values of a file's section by the names of the flags that `parser` declares, with
    underscores. InputError for a name that is no flag, and for a value that its flag refuses.
    """
    section = file.get(SECTION, {})
    if not isinstance(section, Mapping):
        raise InputError(f"{SECTION} = {section!r}", "a section", f"Write [{SECTION}] above it.")
    flags = {action.dest: action for action in parser._actions}
    found = {}
    for name, value in section.items():
        if name not in flags:
            todo = "Settings of engines stand outside of [serve], or in a table of serve.models."
            raise unknown_name(f"setting of [{SECTION}]", name, flags, todo)
        found[name] = models_in(value) if name == MODELS else _checked(name, value, flags[name])
    return found


def models_in(value: Any) -> list[str | Mapping[str, Any]]:
    """Return the entries of serve.models: the model, or a table with `model` and settings."""
    entries = value if isinstance(value, list) else [value]
    for entry in entries:
        model = entry.get("model") if isinstance(entry, Mapping) else entry
        name = entry.get("name", "x") if isinstance(entry, Mapping) else "x"
        if not all(isinstance(text, str) and text for text in (model, name)):
            raise InputError(
                f"{SECTION}.{MODELS} has {entry!r}",
                "a model, or a table with the text `model`, and a text if it has a `name`",
                f'Write [[{SECTION}.{MODELS}]] and model = "demo" below it.',
            )
    return entries


def _checked(name: str, value: Any, action: argparse.Action) -> Any:
    """Return a value that the flag of the name accepts."""
    if action.nargs == 0:
        right, allowed = isinstance(value, bool), "true or false"
    elif isinstance(action.default, list):
        right, allowed = isinstance(value, list), "a list of texts"
        right = right and all(isinstance(one, str) for one in value)
    elif action.type in (int, float):
        kinds = (int,) if action.type is int else (int, float)
        right = isinstance(value, kinds) and not isinstance(value, bool)
        allowed = "a whole number" if action.type is int else "a number"
    else:
        right, allowed = isinstance(value, str), "a text"
    if action.choices is not None:
        right, allowed = value in action.choices, f"one of {', '.join(action.choices)}"
    if not right:
        given = f"{SECTION}.{name} = {value!r}"
        raise InputError(given, allowed, f"Set what --{name.replace('_', '-')} takes.")
    return float(value) if action.type is float else value
