"""Random JSON schemas whose values have a bounded length, for guided decoding with models that
choose at random.
"""

from __future__ import annotations

from typing import Any

import numpy as np

WORDS = ("name", "age", "x", "items", "is ok", "größe", "list", "a/b", "note", "id")
FORMATS = ("date", "uuid", "ipv4")
PATTERNS = ("^[a-z]{1,6}$", "^(on|off)$", "^[A-F0-9]{2}-[0-9]{1,4}$")
CONSTANTS = (None, True, -3, 2.5, "é\n", [1, "two"], {"k": []})


def bounded_schema(rng: np.random.Generator) -> dict[str, Any]:
    """A schema of whose values few are longer than some 200 bytes, with the keywords that
    are held.
    """
    return _schema(rng, 2) | {"$defs": {"own": _schema(rng, 0)}}


def _schema(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "plain", "choice", "pattern"]
    if depth:
        kinds += ["object", "object", "array", "tuple", "any", "ref"]
    return _MAKERS[str(rng.choice(kinds))](rng, depth)


def _string(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    least = int(rng.integers(0, 4))
    return {"type": "string", "minLength": least, "maxLength": least + int(rng.integers(0, 8))}


def _integer(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    low = int(rng.integers(-1000, 1000))
    schema: dict[str, Any] = {
        "type": "integer",
        "minimum": low,
        "maximum": low + int(rng.integers(5, 5000)),
    }
    return schema | ({"multipleOf": int(rng.integers(2, 6))} if rng.random() < 0.3 else {})


def _number(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    """A number has no longest form; a multiple of a quarter between two bounds is as good as
    bounded.
    """
    low = int(rng.integers(-50, 50))
    return {
        "type": "number",
        "minimum": low,
        "exclusiveMaximum": low + int(rng.integers(1, 100)),
        "multipleOf": 0.25,
    }


def _plain(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    return {"type": str(rng.choice(["boolean", "null"]))}


def _choice(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    picked = [CONSTANTS[i] for i in rng.permutation(len(CONSTANTS))[: rng.integers(1, 4)]]
    return {"const": picked[0]} if len(picked) == 1 else {"enum": picked}


def _pattern(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {"type": "string", "format": str(rng.choice(FORMATS))}
    return {"type": "string", "pattern": str(rng.choice(PATTERNS))}


def _object(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    names = [WORDS[i] for i in rng.permutation(len(WORDS))[: rng.integers(1, 5)]]
    properties = {name: _schema(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        "title": "an object",
    }


def _array(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    least = int(rng.integers(0, 3))
    items = _schema(rng, depth - 1)
    return {
        "type": "array",
        "items": items,
        "minItems": least,
        "maxItems": least + int(rng.integers(0, 3)),
    }


def _tuple(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    first = [_schema(rng, depth - 1) for _ in range(rng.integers(1, 4))]
    return {
        "type": "array",
        "prefixItems": first,
        "items": False,
        "minItems": int(rng.integers(0, len(first) + 1)),
    }


def _any(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth - 1) for _ in range(rng.integers(2, 4))]}


def _ref(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    pair = {"first": {"$ref": "#/$defs/own"}, "second": {"$ref": "#/$defs/own"}}
    return {
        "type": "object",
        "properties": pair,
        "required": ["second"],
        "additionalProperties": False,
    }


_MAKERS = {
    "string": _string,
    "integer": _integer,
    "number": _number,
    "plain": _plain,
    "choice": _choice,
    "pattern": _pattern,
    "object": _object,
    "array": _array,
    "tuple": _tuple,
    "any": _any,
    "ref": _ref,
}
