"""Reads single fields of config.json and checks their types; errors name the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from enginebay.errors import CheckpointError, shown

# Far above any field of a model, and products of a few such numbers are finite.
_LARGEST = 1e30
MAX_SIZE = 2**31 - 1
"""Largest integer of a field, because sizes and positions are int32 on the device."""


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a finite number; true and false are not."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and -_LARGEST < value < _LARGEST
    )


def positive(
    config: Mapping[str, Any], name: str, default: int | None = None, *, most: int = MAX_SIZE
) -> int:
    """Read a field that must be an integer from 1 to `most`; `default` if it is absent."""
    value = config.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise bad_field(name, value, "a positive whole number", is_null=name in config)
    if value > most:
        raise bad_field(name, value, f"1 to {most}")
    return value


def whole_number(config: Mapping[str, Any], name: str, default: int, *, least: int) -> int:
    """Read a field that must be an integer of at least `least`; `default` if it is absent."""
    value = config.get(name, default)
    if type(value) is not int or not least <= value <= MAX_SIZE:
        raise bad_field(name, value, f"a whole number from {least}", is_null=name in config)
    return value


def number(config: Mapping[str, Any], name: str, default: float, *, path: str = "") -> float:
    """Read a field that must be a positive number.

    `path` is its name in errors, for a field inside another one.
    """
    value = config.get(name, default)
    if not is_number(value) or value <= 0:
        raise bad_field(path or name, value, "a positive number", is_null=name in config)
    return float(value)


def optional_number(config: Mapping[str, Any], name: str, default: float) -> float | None:
    """Read a field that must be a positive number, or null, which is None."""
    if name in config and config[name] is None:
        return None
    return number(config, name, default)


def flag(config: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """Read a field that must be true or false."""
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise bad_field(name, value, "true or false", is_null=name in config)
    return value


def refuse_others(config: Mapping[str, Any], served: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a field that is there, not null, and not the only served value."""
    for name, value in served.items():
        if config.get(name) not in (None, value):
            allowed = f"{str(value).lower() if isinstance(value, bool) else value}, or absent"
            raise bad_field(name, config[name], allowed)


def with_own_names(config: Mapping[str, Any], usual: Mapping[str, str]) -> dict[str, Any]:
    """Return the configuration with a family's own names of fields. `usual`: own name -> name in
    other families, which a file may have instead. CheckpointError when both are there and differ.
    """
    for own, other in usual.items():
        if own in config and other in config and config[own] != config[other]:
            raise bad_field(other, config[other], f"{own}, which is {shown(config[own])}")
    return {o: config[u] for o, u in usual.items() if u in config} | dict(config)


def bad_field(name: str, value: object, allowed: str, *, is_null: bool = False) -> CheckpointError:
    """Return the error for a field that is missing, malformed or not supported. With `is_null` a
    value None is a null in the file, and not a missing field.
    """
    given = f"config.json has {name} = {'null' if value is None else shown(value)}"
    if value is None and not is_null:
        given = f"config.json has no {name}"
    return CheckpointError(
        given, allowed, "Correct the checkpoint's config.json, or choose another model."
    )
