"""What a JSON schema may hold, so that nothing of it is left out: keywords that are held, and those
that say nothing of a value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

HELD = frozenset(
    [
        "type",
        "const",
        "enum",
        "anyOf",
        "oneOf",
        "allOf",
        "$ref",
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "minProperties",
        "maxProperties",
        "items",
        "prefixItems",
        "additionalItems",
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
    ]
)
"""Keywords that llguidance holds, or refuses itself where it cannot."""

SILENT = frozenset(
    [
        "$schema",
        "$id",
        "id",
        "$anchor",
        "$comment",
        "$defs",
        "definitions",
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
    ]
)
"""Keywords that say nothing of whether a value is valid."""

OPTIONS = "x-guidance"
"""llguidance's own key of a schema: of its options only whitespace_flexible is open to requests."""

_ONE = ("additionalProperties", "additionalItems", "items")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def why_not_enforced(schema: dict[str, Any]) -> str | None:
    """Why the outputs of this schema could not be held to all that it says, or None."""
    schema = dict(schema)
    options = schema.pop(OPTIONS, {"whitespace_flexible": False})
    if not (
        isinstance(options, dict)
        and options.keys() <= {"whitespace_flexible"}
        and all(isinstance(value, bool) for value in options.values())
    ):
        return (
            f"{OPTIONS} = {json.dumps(options)}, of which only whitespace_flexible "
            "(true or false) is known"
        )
    for where, one in _schemas(schema, ""):
        unknown = sorted(one.keys() - HELD - SILENT)
        if unknown:
            return f"keywords that are not held: {', '.join(unknown)} (in {where or 'the whole'})"
        reason = _few_keys(one)
        if reason:
            return f"{reason} (in {where or 'the whole'})"
    return None


def _schemas(schema: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema within one, with its path. What stands where none may stand is the library's to
    refuse.
    """
    if not isinstance(schema, dict):
        return
    yield where, schema
    for key in _ONE:
        yield from _schemas(schema.get(key), f"{where}/{key}")
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            for index, one in enumerate(schema[key]):
                yield from _schemas(one, f"{where}/{key}/{index}")
    for key in _MAPS:
        if isinstance(schema.get(key), dict):
            for name, one in schema[key].items():
                yield from _schemas(one, f"{where}/{key}/{name}")


def _few_keys(schema: dict[str, Any]) -> str | None:
    """Keys without a name of their own in a schema may come twice in an output, and count once when
    it is read.
    """
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    if not isinstance(least, int) or not isinstance(required, list) or least <= len(required) + 1:
        return None
    return f"minProperties = {least}, more than one above its {len(required)} required ones"
