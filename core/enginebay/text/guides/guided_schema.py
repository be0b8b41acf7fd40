"""The keywords that a JSON schema may have, so that none is ignored: keywords that are enforced,
and keywords that do not constrain values.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from decimal import ROUND_DOWN, Decimal
from fractions import Fraction
from typing import Any, TypeGuard

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
        reason = _malformed(one) or _few_keys(one)
        if reason:
            return f"{reason} (in {where or 'the whole'})"
    return None


STEP = 1e-9
"""How far a bound is moved that llguidance would let through; see `move_bounds`."""


def move_bounds(schema: dict[str, Any]) -> None:
    """Replace exclusive bounds that llguidance takes as inclusive, in place.

    It does so for a number between two bounds of one whole part, if the exclusive bound is a whole
    number: with exclusiveMinimum 0 and maximum 0.5, the answer could be 0. The bound is replaced by
    an inclusive one that is STEP inside, or two steps of a float if these are larger. The bounds of
    a schema with allOf or $ref may come from several places, so all of them are moved there.
    """
    each = [one for _, one in _schemas(schema, "")]
    is_spread = any("allOf" in one or "$ref" in one for one in each)
    for one in each:
        for exclusive, inclusive, others, sign in (
            ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum"), 1),
            ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum"), -1),
        ):
            bound = one.get(exclusive)
            if not _is_number(bound) or bound != int(bound):
                continue
            ends = [one[name] for name in others if _is_number(one.get(name))]
            if is_spread or any(sign * (end - bound) < 1 for end in ends):
                del one[exclusive]
                moved = bound + sign * max(STEP, 2 * math.ulp(bound))
                own = one.get(inclusive, moved)
                one[inclusive] = max(own, moved) if sign > 0 else min(own, moved)


_ALTERNATIVES = ("anyOf", "oneOf", "allOf", "$ref", "enum", "const")
NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
MAX_DECIMALS = 9
"""Of a multipleOf whose multiples with fewer decimals become alternatives."""


def add_short_numbers(schema: dict[str, Any]) -> None:
    """Add numbers that llguidance takes only with zeros at their end, or not at all, in place.

    With maximum 99.99 it refuses 99.9, and with multipleOf 0.25 it refuses 0.5: it wants as many
    decimals as the keyword has. The shorter numbers are alternatives of their own. A schema that
    has alternatives, and bounds from several places, stay as they are.
    """
    for one in [one for _, one in _schemas(schema, "")]:
        held = {name: one[name] for name in NUMERIC if _is_number(one.get(name))}
        if one.get("type") == "integer" or any(name in one for name in _ALTERNATIVES):
            continue
        exact = {name: Decimal(str(value)) for name, value in held.items()}
        multiples = _longer_multiples(exact.get("multipleOf"))
        numbers = [float(value) for value in _cut_bounds(exact) if _holds(exact, value)]
        if multiples or numbers:
            each: list[dict[str, Any]] = [held | {"multipleOf": step} for step in multiples]
            for name in held:
                del one[name]
            one["anyOf"] = [held, *each, *([{"enum": numbers}] if numbers else [])]


def _longer_multiples(multiple: Decimal | None) -> list[float]:
    """Return the multiples of `multiple` that have each smaller number of decimals, from one up."""
    places = 0 if multiple is None else _num_decimals(multiple)
    if multiple is None or not 2 <= places <= MAX_DECIMALS:
        return []
    whole = int(multiple.scaleb(places))
    steps = (Decimal(math.lcm(whole, 10 ** (places - n))) for n in range(1, places))
    return [float(step.scaleb(-places)) for step in steps]


def _cut_bounds(held: Mapping[str, Decimal]) -> list[Decimal]:
    """Return the bounds that are farthest from 0 with fewer decimals, from one up."""
    ends = [(held.get(name), 1) for name in ("maximum", "exclusiveMaximum")]
    ends += [(held.get(name), -1) for name in ("minimum", "exclusiveMinimum")]
    return list(
        dict.fromkeys(
            end.quantize(Decimal(1).scaleb(-n), ROUND_DOWN).normalize()
            for end, sign in ends
            if end is not None and sign * end > 0
            for n in range(1, _num_decimals(end))
        )
    )


def _num_decimals(value: Decimal) -> int:
    exponent = value.normalize().as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _holds(held: Mapping[str, Decimal], value: Decimal) -> bool:
    """Return whether a number with decimals satisfies numeric keywords."""
    return (
        _num_decimals(value) > 0
        and "e" not in repr(float(value))
        and value >= held.get("minimum", value)
        and value <= held.get("maximum", value)
        and ("exclusiveMinimum" not in held or value > held["exclusiveMinimum"])
        and ("exclusiveMaximum" not in held or value < held["exclusiveMaximum"])
        and ("multipleOf" not in held or Fraction(value) % Fraction(held["multipleOf"]) == 0)
    )


def _is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a number that fits a float."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max


def _malformed(schema: dict[str, Any]) -> str | None:
    """Return what is wrong with keywords that the library takes although no schema may have
    them.
    """
    multiple = schema.get("multipleOf")
    if _is_number(multiple) and multiple <= 0:
        return f"multipleOf = {json.dumps(multiple)}: it must be greater than 0"
    for key in ("allOf", "prefixItems"):
        if schema.get(key) == []:
            return f"{key} = []: it must have a schema"
    for key in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(schema.get(key), bool):
            return f"{key} = {json.dumps(schema[key])}: it must be a number"
    for key in ("$defs", "definitions"):
        given = schema.get(key, {})
        if not isinstance(given, dict):
            return f"{key} = {json.dumps(given)[:80]}: it must be an object"
        wrong = next((one for one in given.values() if not isinstance(one, dict | bool)), None)
        if wrong is not None or None in given.values():
            return f"{key} with {json.dumps(wrong)[:80]}: it must have schemas"
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
