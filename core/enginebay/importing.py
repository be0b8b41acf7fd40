"""Runs the code of plugins within the guard of this process while it is imported."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from contextlib import AbstractContextManager

from enginebay.errors import error_line
from enginebay.hooks import GROUP

PLUGIN = "startup"
"""The entry point of the plugin that has `guard`."""

Guard = Callable[[str], AbstractContextManager[None]]
"""Returns a context manager for code of a plugin, such as "plugin 'lifo'". It raises StrayExitError
in place of a BaseException that is no Exception, except for the KeyboardInterrupt of a real Ctrl-C.
"""


class StrayExitError(Exception):
    """An import raised a BaseException that is no Exception, such as SystemExit."""


def reason_of(error: BaseException) -> str:
    """Return an error on one line; for a StrayExitError, the exception that was raised first."""
    if isinstance(error, StrayExitError) and error.__cause__ is not None:
        error = error.__cause__
    return error_line(error)


def guarded(who: str) -> AbstractContextManager[None]:
    """Return the guard for a block that imports or calls code of `who`."""
    return _guard()(who)


@functools.cache
def _guard() -> Guard:
    [point] = importlib.metadata.entry_points(group=GROUP, name=PLUGIN)
    guard: Guard = point.load().guard
    return guard
