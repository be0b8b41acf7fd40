"""Single fields of config.json, each checked for its type; an error names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from enginebay.errors import CheckpointError, shown

# No field of a model is near it, and products of a few such numbers are still finite.
_LARGEST = 1e30
MAX_SIZE = 2**31 - 1
"""Largest whole number of a field: sizes and positions are int32 on the device."""


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value of config.json is a finite number; true and false are none."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and -_LARGEST < value < _LARGEST
    )


def positive(
    config: Mapping[str, Any], name: str, default: int | None = None, *, most: int = MAX_SIZE
) -> int:
    """A field that must be a whole number from 1 to `most`; an absent one means the default, if
    there is one.
    """
    value = config.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise bad_field(name, value, "a positive whole number")
    if value > most:
        raise bad_field(name, value, f"1 to {most}")
    return value


def number(config: Mapping[str, Any], name: str, default: float, *, path: str = "") -> float:
    """A field that must be a positive number. `path` names it in the error where it lies in another
    field.
    """
    value = config.get(name, default)
    if not is_number(value) or value <= 0:
        raise bad_field(path or name, value, "a positive number")
    return float(value)


def flag(config: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """A field that must be true or false."""
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise bad_field(name, value, "true or false")
    return value


def bad_field(name: str, value: object, allowed: str) -> CheckpointError:
    """The error for a field of config.json that is missing, null, malformed or not served."""
    given = (
        f"config.json has no {name}"
        if value is None
        else f"config.json has {name} = {shown(value)}"
    )
    return CheckpointError(
        given, allowed, "Correct the checkpoint's config.json, or choose another model."
    )
