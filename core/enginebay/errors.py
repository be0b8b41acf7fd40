"""The exception tree. Its three branches: wrong input, not supported here, and a bug of ours."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final


class EnginebayError(Exception):
    """Base class of all errors that enginebay raises on purpose."""

    exit_code = 1

    def __init__(self, given: str = "", allowed: str | None = None, todo: str = "") -> None:
        """Pass a whole sentence as `given`, or the three parts of a message; see `explain`."""
        super().__init__(given if allowed is None else explain(given, allowed, todo))


class InputError(EnginebayError, ValueError):
    """The caller's input is wrong. The message says what is allowed and what to do."""

    exit_code = 2


class ConfigError(InputError):
    """A value, section or combination of the configuration is not allowed."""


class UnknownNameError(InputError):
    """No part is registered under a name."""


class RequestError(InputError):
    """A request that this engine can never serve in this form."""


class KeywordError(RequestError, TypeError):
    """A keyword that a method does not have."""


class PromptLengthError(RequestError):
    """A text that certainly has more tokens than a prompt may have."""


class IncorrectError(InputError):
    """An implementation that was not registered returns results that break its op's contract."""


class CheckpointError(InputError):
    """A model folder that is missing, incomplete or inconsistent."""


class UnsupportedError(EnginebayError):
    """Valid input that this platform, plugin or build does not support."""

    exit_code = 2


class PluginError(UnsupportedError):
    """A plugin that could not be loaded. Raised when one of its parts is chosen."""


class StoppedError(EnginebayError):
    """The engine was closed, or the request's step failed, before the request finished."""


class NonFiniteError(StoppedError):
    """A request whose logits have NaN or infinity, so that no token follows from them."""


class CompilationError(UnsupportedError):
    """A program would have to be compiled, but `forbid_compiling` is on, or the process has too few
    memory maps left.
    """


class InternalError(EnginebayError):
    """A broken invariant, which is a bug of enginebay or a plugin. Please report it."""


def explain(given: str, allowed: str, todo: str) -> str:
    """Join the three parts of an error message: what was given, what is allowed, what to do."""
    given = given if given.endswith("...") else given.removesuffix(".")
    return f"{given}. Allowed: {allowed}. {todo}"


def shown(value: object, limit: int = 100) -> str:
    """Return a value as an error message quotes it: on one line, and cut after `limit`
    characters. Of texts, lists and objects, however large, only the beginning is read.
    """
    room = [limit]
    try:
        text = " ".join(repr(_beginning(value, room)).split())
    except Exception:  # noqa: BLE001  # a number of thousands of digits, or a class of the caller's
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= limit and room[0] >= 0 else f"{text[:limit]}..."


def _beginning(value: Any, room: list[int]) -> Any:
    """Return the beginning of a value, whose repr has more than `room[0]` characters where
    something is left out; `room[0]` is then negative afterwards.
    """
    room[0] -= 1
    if isinstance(value, str | bytes):
        start = value[: max(0, room[0]) + 1]
        room[0] -= len(start)
        return start
    if type(value) not in (list, tuple, dict):
        return value
    made = []
    for one in value.items() if type(value) is dict else value:
        if room[0] < 0:
            break
        made.append(
            tuple(_beginning(part, room) for part in one)
            if type(value) is dict
            else _beginning(one, room)
        )
    return type(value)(made)


def shown_text(text: str, limit: int = 300) -> str:
    """Return a text of another library on one line, without control characters and cut after
    `limit` characters.
    """
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * limit]).split())
    return line if len(line) <= limit else f"{line[:limit]}..."


def error_line(error: BaseException) -> str:
    """Return type and message of an error on one line, even when reading its message raises."""
    try:
        message = str(error)
    except BaseException:  # noqa: BLE001  # a plugin's class of errors may raise anything
        message = "its message cannot be read"
    return shown_text(f"{type(error).__name__}: {message}", 2000).removesuffix(":")


OTHER_PROGRAMS: Final = tomllib.loads(
    Path(__file__).with_name("other_programs.toml").read_text(encoding="utf-8")
)
"""Names of options and values in other programs, with their names in enginebay."""


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.5) -> str | None:
    """Return the name in `known` that is most similar to `name`; None when every similarity, from 0
    to 1, is below `cutoff`.
    """
    names = list(known)
    other = OTHER_PROGRAMS["names"].get(name[:100].lower())
    if other in names:
        return other
    return next(iter(difflib.get_close_matches(name[:100], names, n=1, cutoff=cutoff)), None)


def unknown_name(
    what: str, name: str, known: Iterable[str], todo: str = "Choose one of these."
) -> UnknownNameError:
    """Return the error for a name that is not in `known`. It suggests the most similar name."""
    names = sorted(set(known))
    near = nearest(name, names)
    hint = f"Did you mean {near!r}? " if near else ""
    return UnknownNameError(
        f"unknown {what} {shown(name)}", ", ".join(names) or "none is installed", hint + todo
    )
