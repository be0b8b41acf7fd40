"""The error that a request ends with when code of enginebay or of a plugin has failed."""

from __future__ import annotations

from enginebay.errors import EnginebayError, InternalError, error_line
from enginebay.startup import startup


def failure(what: str, error: BaseException) -> EnginebayError:
    """Return the error to report when `what` failed: `error` itself if it is an EnginebayError,
    else an InternalError with `error` as its cause.
    """
    if isinstance(error, EnginebayError):
        return error
    given = f"{what} failed: {error_line(error)}"
    todo = f"Other requests continue. {startup().please_report(error)}"
    made = InternalError(given, "code that raises no such error", todo)
    made.__cause__ = error
    return made
