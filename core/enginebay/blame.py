"""Whose part failed: the plugin whose code an error was raised in, for the sentence that asks for a
report.
"""

from __future__ import annotations

import importlib.metadata
import traceback

from enginebay.errors import EnginebayError, InternalError, error_line
from enginebay.hooks import GROUP


def failure(what: str, error: BaseException) -> EnginebayError:
    """The error to report when `what` failed: `error` itself if it is one of ours, or an
    InternalError that it is the cause of.
    """
    if isinstance(error, EnginebayError):
        return error
    given = f"{what} failed: {error_line(error)}"
    todo = f"The service goes on. {please_report(error)}"
    made = InternalError(given, "one that succeeds", todo)
    made.__cause__ = error
    return made


def please_report(error: BaseException) -> str:
    """The sentence "please report this", which names the plugin that the innermost frame of a
    plugin belongs to.
    """
    plugins = _plugins()
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in plugins:
            return f"Please report this as a fault of {plugins[package]}."
    return "Please report this."


def _plugins() -> dict[str, str]:
    """Top-level module -> the plugin that it belongs to, in words."""
    found: dict[str, str] = {}
    for point in importlib.metadata.entry_points(group=GROUP):
        words = f"plugin {point.name!r}"
        if point.dist is not None:
            words += f" of {point.dist.name} {point.dist.version}"
        found[point.value.partition(":")[0].partition(".")[0]] = words
    return found
