"""Runs the code of plugins within the guard of this process while it is imported."""

from __future__ import annotations

from contextlib import AbstractContextManager

from enginebay.errors import error_line
from enginebay.startup import startup


class StrayExitError(Exception):
    """An import raised a BaseException that is no Exception, such as SystemExit."""


def reason_of(error: BaseException) -> str:
    """Return an error on one line; for a StrayExitError, the exception that was raised first."""
    if isinstance(error, StrayExitError) and error.__cause__ is not None:
        error = error.__cause__
    return error_line(error)


def guarded(who: str) -> AbstractContextManager[None]:
    """Return the guard for a block that imports or calls code of `who`."""
    return startup().guard(who)
