"""What the core takes from the plugin `startup` before it loads any other plugin."""

from __future__ import annotations

import functools
import importlib.metadata
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ValidationError

GROUP = "enginebay"
"""The group of the entry points of plugins."""


class Startup(Protocol):
    """The module that the entry point `startup` names."""

    def guard(self, who: str) -> AbstractContextManager[None]:
        """Return a context manager for code of a plugin, such as "plugin 'lifo'". It raises
        `enginebay.plugins.importing.StrayExitError` in place of a BaseException that is no
        Exception, except for the KeyboardInterrupt of a real Ctrl-C.
        """

    def check_declaration(self, declaration: Any) -> None:
        """Raise PluginError for an `enginebay.plugins.hooks.Declaration` that would fail later,
        when the part is chosen.
        """

    def described(self, error: ValidationError, model: type[BaseModel]) -> str:
        """Return pydantic's findings about a `model` as our messages, one for each wrong field."""

    def values_of_toml(self, path: str | Path) -> dict[str, Any]:
        """Return the values of a TOML file. ConfigError when it is missing, is not TOML, or nests
        its sections too deeply.
        """

    def please_report(self, error: BaseException) -> str:
        """Return the sentence "Please report this ...", which names the plugin in whose code the
        error was raised.
        """

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Return a context manager that logs `what` ("compiling ...") on the logger
        "enginebay.waits" when its block takes long.
        """


@functools.cache
def startup() -> Startup:
    """Return the module of the entry point, which is loaded at the first call."""
    [point] = importlib.metadata.entry_points(group=GROUP, name="startup")
    module: Startup = point.load()
    return module
