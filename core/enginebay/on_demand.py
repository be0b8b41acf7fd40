"""Public names of a package that are imported when they are first asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def on_demand(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """A package's __getattr__. `homes`: the names of each module, with spaces between them."""
    modules = {name: module for module, names in homes.items() for name in names.split()}

    def find(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    return find
