"""Errors of plugins: the plugin whose code raised an error, and the error that its request ends
with.
"""

from __future__ import annotations

import importlib.metadata
import traceback

from enginebay.errors import EnginebayError, InternalError, error_line
from enginebay.plugins.hooks import GROUP


def please_report(error: BaseException) -> str:
    """Return the sentence "Please report this ...". It names the plugin in whose code the error was
    raised: the innermost frame that belongs to a plugin.
    """
    plugins = _plugins()
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in plugins:
            return f"Please report this to the authors of {plugins[package]}."
    return "Please report this."


def failure(what: str, error: BaseException) -> EnginebayError:
    """Return the error to report when `what` failed: `error` itself if it is an EnginebayError,
    else an InternalError with `error` as its cause.
    """
    if isinstance(error, EnginebayError):
        return error
    given = f"{what} failed: {error_line(error)}"
    todo = f"Other requests continue. {please_report(error)}"
    made = InternalError(given, "code that raises no such error", todo)
    made.__cause__ = error
    return made


def _plugins() -> dict[str, str]:
    """Top-level module -> name of its plugin, as an error message shows it."""
    found: dict[str, str] = {}
    for point in importlib.metadata.entry_points(group=GROUP):
        words = f"plugin {point.name!r}"
        if point.dist is not None:
            words += f" of {point.dist.name} {point.dist.version}"
        found[point.value.partition(":")[0].partition(".")[0]] = words
    return found
