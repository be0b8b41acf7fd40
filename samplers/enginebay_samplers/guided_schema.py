"""The keywords that a JSON schema may have, so that none is ignored: keywords that are enforced,
and keywords that do not constrain values.
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
"""Keywords that llguidance enforces, or refuses itself where it cannot."""

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
"""Keywords that do not affect whether a value is valid."""

OPTIONS = "x-guidance"
"""llguidance's own key in a schema; requests may only use its option whitespace_flexible."""

_ONE = ("additionalProperties", "additionalItems", "items")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def why_not_enforced(schema: dict[str, Any]) -> str | None:
    """Return why outputs would not satisfy everything that this schema says, or None."""
    schema = dict(schema)
    options = schema.pop(OPTIONS, {"whitespace_flexible": False})
    if not (
        isinstance(options, dict)
        and options.keys() <= {"whitespace_flexible"}
        and all(isinstance(value, bool) for value in options.values())
    ):
        return (
            f"{OPTIONS} = {json.dumps(options)}: only whitespace_flexible "
            "(true or false) is allowed"
        )
    for where, one in _schemas(schema, ""):
        unknown = sorted(one.keys() - HELD - SILENT)
        if unknown:
            return (
                f"keywords that are not supported: {', '.join(unknown)} (in {where or 'the whole'})"
            )
        reason = _few_keys(one)
        if reason:
            return f"{reason} (in {where or 'the whole'})"
    return None


def _schemas(schema: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every schema within a schema, with its path. The library refuses misplaced values."""
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
    """Keys that the schema does not name may occur twice in an output, and count once when it is
    read.
    """
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    if not isinstance(least, int) or not isinstance(required, list) or least <= len(required) + 1:
        return None
    return f"minProperties = {least}, more than its {len(required)} required keys plus one"
