"""Finds the plugin whose code raised an error, so that the message says where to report it."""

from __future__ import annotations

import importlib.metadata
import traceback

from enginebay.startup import GROUP


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


def _plugins() -> dict[str, str]:
    """Top-level module -> name of its plugin, as an error message shows it."""
    found: dict[str, str] = {}
    for point in importlib.metadata.entry_points(group=GROUP):
        words = f"plugin {point.name!r}"
        if point.dist is not None:
            words += f" of {point.dist.name} {point.dist.version}"
        found[point.value.partition(":")[0].partition(".")[0]] = words
    return found
