"""Finds the types of JSON values that a schema allows, through its references and alternatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias
from urllib.parse import unquote

JsonType: TypeAlias = Literal["string", "integer", "number", "boolean", "null", "object", "array"]
Types: TypeAlias = frozenset[JsonType]

ALL: Types = frozenset(["string", "integer", "number", "boolean", "null", "object", "array"])
_NUMBER: Types = frozenset(["integer", "number"])
_NAMED: Mapping[str, Types] = {**{name: frozenset([name]) for name in ALL}, "number": _NUMBER}
_PYTHON: tuple[tuple[type, Types], ...] = (
    (bool, frozenset(["boolean"])),
    (str, frozenset(["string"])),
    (int, frozenset(["integer"])),
    (float, frozenset(["number"])),
    (dict, frozenset(["object"])),
    (list, frozenset(["array"])),
    (type(None), frozenset(["null"])),
)
_SIGNS: tuple[tuple[Types, tuple[str, ...]], ...] = (
    (_NAMED["object"], ("properties", "required", "additionalProperties", "patternProperties")),
    (_NAMED["array"], ("items", "prefixItems", "minItems", "maxItems")),
    (_NUMBER, ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
)
"""Keywords of one type only: they tell what a schema without a type is about."""

MAX_DEPTH = 64
"""Levels of a schema that are read; a schema below them allows every type."""


class SchemaTypes:
    """Reads a schema. Its references refer to places within it."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[tuple[str, str | None], Types] = {}
        """Types by reference and by name of the property, each of which is computed once."""

    def types(self) -> Types:
        """Return the types of the values that the whole schema allows.

        Reads type, enum, const, $ref, anyOf, oneOf and allOf. A schema with none of these allows
        the type that its other keywords are about, or else all types.
        """
        return self._types(self._root, 0)

    def of_property(self, name: str) -> Types:
        """Return the types that the value of a property may have in an object of the schema."""
        return self._of_property(self._root, name, 0)

    def _types(self, schema: Any, depth: int) -> Types:
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return ALL
        found = self._joined(schema, None, depth, self._types)
        if "type" in schema:
            found &= _named(schema["type"])
        if isinstance(schema.get("enum"), list):
            found &= _union([types_of_value(value) for value in schema["enum"]])
        if "const" in schema:
            found &= types_of_value(schema["const"])
        if found == ALL:
            return next(
                (types for types, keys in _SIGNS if not schema.keys().isdisjoint(keys)), ALL
            )
        return found

    def _of_property(self, schema: Any, name: str, depth: int) -> Types:
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return ALL
        properties = schema.get("properties")
        own = schema.get("additionalProperties")
        if isinstance(properties, dict) and name in properties:
            own = properties[name]
        return self._types(own, depth + 1) & self._joined(
            schema, name, depth, lambda one, level: self._of_property(one, name, level)
        )

    def _joined(
        self,
        schema: Mapping[str, Any],
        name: str | None,
        depth: int,
        read: Callable[[Any, int], Types],
    ) -> Types:
        """Return what a schema's reference, alternatives and parts allow, each as `read` has it."""
        found = ALL
        reference = schema.get("$ref")
        if isinstance(reference, str):
            key = (reference, name)
            if key not in self._known:
                self._known[key] = ALL  # for a reference within itself
                self._known[key] = read(self._resolve(reference), depth + 1)
            found &= self._known[key]
        for keyword in ("anyOf", "oneOf"):
            branches = schema.get(keyword)
            if isinstance(branches, list):
                found &= _union([read(one, depth + 1) for one in branches])
        parts = schema.get("allOf")
        for part in parts if isinstance(parts, list) else ():
            found &= read(part, depth + 1)
        return found

    def _resolve(self, reference: str) -> Any:
        """Return the schema that a JSON pointer in the document names, or None."""
        if not reference.startswith("#"):
            return None
        found = self._root
        for part in unquote(reference[1:]).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict):
                found = found.get(key)
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                return None
        return found


def _named(given: Any) -> Types:
    names = given if isinstance(given, list) else [given]
    none: Types = frozenset()
    return none.union(*(_NAMED[name] for name in names if isinstance(name, str) and name in _NAMED))


def types_of_value(value: Any) -> Types:
    """Return the types that a JSON value satisfies."""
    return next((types for kind, types in _PYTHON if isinstance(value, kind)), ALL)


def _union(found: list[Types]) -> Types:
    """Return all types of a list; an empty list says nothing, so every type is allowed."""
    none: Types = frozenset()
    return none.union(*found) if found else ALL
