"""Imports the public names of a package when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def on_demand(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return a __getattr__ and a __dir__ for a package. `homes`: module -> its names, separated by
    spaces.
    """
    modules = {name: module for module, names in homes.items() for name in names.split()}

    def find(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return find, listed
