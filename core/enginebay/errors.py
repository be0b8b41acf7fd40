"""The exception tree: wrong input, not supported here, and our own bug are three branches."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Final


class EnginebayError(Exception):
    """Base of everything that enginebay raises on purpose."""

    exit_code = 1

    def __init__(self, given: str = "", allowed: str | None = None, todo: str = "") -> None:
        """A sentence, or the three parts of a message about what was given; see `explain`."""
        super().__init__(given if allowed is None else explain(given, allowed, todo))


class InputError(EnginebayError, ValueError):
    """What the caller gave is wrong; the message says what is allowed and what to do."""

    exit_code = 2


class ConfigError(InputError):
    """A configuration value, section or combination is not allowed."""


class UnknownNameError(InputError):
    """A name that nothing is registered under."""


class RequestError(InputError):
    """A request that can never be served as it stands."""


class IncorrectError(InputError):
    """An implementation given by hand whose results are not what its op's contract says."""


class CheckpointError(InputError):
    """A model folder that is missing, incomplete or inconsistent."""


class UnsupportedError(EnginebayError):
    """Right in itself, but not possible with this platform, plugin or build."""

    exit_code = 2


class PluginError(UnsupportedError):
    """A plugin that could not be loaded; raised when somebody picks it."""


class StoppedError(EnginebayError):
    """The engine was closed, or the request's step failed, before the request finished."""


class CompilationError(UnsupportedError):
    """A program was about to be compiled while the engine was told to compile no more."""


class InternalError(EnginebayError):
    """A broken invariant of ours: please report it."""


def explain(given: str, allowed: str, todo: str) -> str:
    """Join the three parts every error message has: what was given, what is allowed, what to do."""
    given = given if given.endswith("...") else given.removesuffix(".")
    return f"{given}. Allowed: {allowed}. {todo}"


def shown(value: object, limit: int = 100) -> str:
    """A value as an error message quotes it: in one line of at most `limit` characters and an
    ellipsis.
    """
    if isinstance(value, str | bytes):
        value = value[: limit + 1]
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001  # nested too deeply, a number of thousands of digits, or a class of the caller's
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= limit else f"{text[:limit]}..."


def shown_text(text: str, limit: int = 300) -> str:
    """A sentence of another library, without line breaks and control characters, cut to `limit`
    characters.
    """
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * limit]).split())
    return line if len(line) <= limit else f"{line[:limit]}..."


def error_line(error: BaseException) -> str:
    """Type and message of any error in one line, even where reading its message raises."""
    try:
        message = str(error)
    except BaseException:  # noqa: BLE001  # a plugin's class of errors may raise anything
        message = "its message cannot be read"
    return shown_text(f"{type(error).__name__}: {message}", 2000).removesuffix(":")


OTHER_PROGRAMS: Final = tomllib.loads(
    Path(__file__).with_name("other_programs.toml").read_text(encoding="utf-8")
)
"""What other programs call options and values that have another name here."""


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.5) -> str | None:
    """The name among `known` that was most likely meant; None when none is so alike (0 to 1)."""
    names = list(known)
    other = OTHER_PROGRAMS["names"].get(name[:100].lower())
    if other in names:
        return other
    return next(iter(difflib.get_close_matches(name[:100], names, n=1, cutoff=cutoff)), None)


def unknown_name(
    what: str, name: str, known: Iterable[str], todo: str = "Choose one of these."
) -> UnknownNameError:
    """The error for a name that is not among `known`; it names the nearest match, if there
    is one.
    """
    names = sorted(set(known))
    near = nearest(name, names)
    hint = f"Did you mean {near!r}? " if near else ""
    return UnknownNameError(
        f"unknown {what} {shown(name)}", ", ".join(names) or "none is installed", hint + todo
    )
