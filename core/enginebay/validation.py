"""Models of pydantic whose errors are ours: what was given, what is allowed, what to do, on one
line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from pydantic import BaseModel, Field, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import ErrorDetails

from enginebay.errors import (
    OTHER_PROGRAMS,
    EnginebayError,
    explain,
    nearest,
    shown,
    shown_text,
)

Given = TypeVar("Given")
Kept = TypeVar("Kept")

if TYPE_CHECKING:

    class Accepts(Generic[Given, Kept]):
        """The type of a field that a caller may set to a `Given`, and that stores a `Kept`."""

        def __get__(self, instance: object, owner: object) -> Kept: ...
        def __set__(self, instance: object, value: Given) -> None: ...

else:

    class Accepts:
        """The same at run time: the type that the field stores."""

        def __class_getitem__(cls, types):
            return types[1]


def option(default: Any, **checks: Any) -> Any:
    """pydantic's Field for fields whose default has another type than the annotation."""
    return Field(default=default, **checks)


class Validated(BaseModel):
    """A pydantic model that raises `refusal` in place of pydantic's ValidationError."""

    refusal: ClassVar[type[EnginebayError]]

    @classmethod
    def refused(cls, error: ValidationError) -> EnginebayError:
        """Return the error to raise in place of pydantic's."""
        return own_error(error, cls.refusal) or cls.refusal(describe_validation(error, cls))

    @classmethod
    @contextlib.contextmanager
    def _refusing(cls) -> Iterator[None]:
        try:
            yield
        except ValidationError as error:
            raise cls.refused(error) from None

    if not TYPE_CHECKING:  # a type checker derives the keywords from the fields

        def __init__(self, **fields):
            with self._refusing():
                super().__init__(**fields)

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Pydantic's, with an error of `refusal`."""
        with cls._refusing():
            return super().model_validate(obj, **options)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """Pydantic's, with an error of `refusal`."""
        with cls._refusing():
            return super().model_validate_json(json_data, **options)

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        """Return the fields whose values are not the defaults, for a short repr."""
        values = (
            (name, getattr(self, name), field) for name, field in type(self).model_fields.items()
        )
        return [
            (name, value)
            for name, value, field in values
            if value != field.get_default(call_default_factory=True)
        ]


def own_error(error: ValidationError, kind: type[EnginebayError]) -> EnginebayError | None:
    """Return the error of class `kind` that one of our validators raised, or None. Its message has
    the three parts already.
    """
    causes = (finding.get("ctx", {}).get("error") for finding in error.errors())
    return next((cause for cause in causes if isinstance(cause, kind)), None)


MAX_FINDINGS = 5
"""Max number of wrong fields in one message."""

MAX_NAME = 60
"""Longer field names are cut in a message."""

FEW_FIELDS = 12
"""Max fields of a model for which the error about an unknown field lists all field names."""


def other_program_hint(name: str, *, is_flag: bool) -> str | None:
    """Return what to do in place of an option of another program, or None for an unknown option.
    `name` is --flag-name or field_name; `is_flag` selects the form of the answer.
    """
    plain = name.lstrip("-").replace("-", "_")
    if plain in OTHER_PROGRAMS["nothing"]:
        return f"Leave it out: {OTHER_PROGRAMS['nothing'][plain]}."
    served = OTHER_PROGRAMS["options"].get(plain)
    return None if served is None else f"Here it is {served[0 if is_flag else 1]}."


def describe_validation(error: ValidationError, model: type[BaseModel]) -> str:
    """Return pydantic's findings as our messages, one for each wrong field."""
    schema = _schema(model)
    messages: dict[str, str] = {}
    for finding in error.errors():
        path, node = _walk(schema, finding["loc"])
        unknown = finding["type"] in ("extra_forbidden", "no_such_attribute")
        name = _path(finding["loc"] if unknown or not path else path) or model.__name__
        if name not in messages:  # pydantic reports a fault for each member of a union
            messages[name] = (
                _unknown(name, finding, node) if unknown else _wrong(name, finding, node, error)
            )
    more = [f"{len(messages) - MAX_FINDINGS} more."] if len(messages) > MAX_FINDINGS else []
    return " Also: ".join([*list(messages.values())[:MAX_FINDINGS], *more])


def _unknown(name: str, finding: ErrorDetails, parent: Mapping[str, Any]) -> str:
    known = list(parent.get("properties", {}))
    last = str(finding["loc"][-1])
    near = nearest(last, known, cutoff=0.65)
    few = ", ".join(known) or "none"
    if len(known) > FEW_FIELDS:
        few = near or f"{', '.join(known[:5])} and {len(known) - 5} more"
    todo = other_program_hint(last, is_flag=False) or _meant(near, "Leave it out.")
    return explain(f"{name} = {shown(finding['input'])}, an unknown field", few, todo)


def _wrong(
    name: str, finding: ErrorDetails, node: Mapping[str, Any], error: ValidationError
) -> str:
    message = (
        shown_text(finding["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    )
    whole = ("model_type", "model_attributes_type", "json_invalid")
    if not finding["loc"] and finding["type"] in whole:
        kind = type(finding["input"]).__name__
        given = message if finding["type"] == "json_invalid" else f"{kind} as {name}"
        return explain(given, "fields with their values", "Pass a dict, or a JSON object.")
    if not finding["loc"]:  # a check of several fields
        return explain(message, "values that fit each other", "Change one of these fields.")
    given = f"{name} = {shown(finding['input'])}"
    allowed = allowed_values(node)
    if finding["type"] == "missing":
        return explain(f"{name} is missing", allowed or "a value", f"Set {name}.")
    if finding["loc"][-1] == "[key]":
        names = [str(choice) for choice in _choices(node.get("propertyNames", {}))]
        near = nearest(str(finding["input"]), names)
        given = f"{name}.{_path([str(finding['input'])])}, an unknown key"
        return explain(given, ", ".join(names), _meant(near, "Leave it out."))
    if finding["type"] == "value_error" or not allowed:
        allowed = message
    return explain(given, allowed, _otherwise(name, node, finding["input"]))


def _otherwise(name: str, node: Mapping[str, Any], value: object) -> str:
    """Return the third part of a message: the most similar allowed value, or the default."""
    choices = [str(choice) for choice in _choices(node)]
    near = nearest(value, choices) if isinstance(value, str) else None
    default = node.get("default")
    is_plain = isinstance(default, str | int | float)
    todo = f"Leave {name} out for its default, {default}."
    return _meant(near, todo if is_plain else f"Change it, or leave {name} out.")


def _meant(near: str | None, otherwise: str) -> str:
    return f"Did you mean {near!r}?" if near else otherwise


def _path(loc: Sequence[int | str]) -> str:
    """Return the path of a field, such as `kernels.attention`. Long or unprintable names are
    quoted and cut.
    """
    names = [str(part) for part in loc]
    return ".".join(n if len(n) <= MAX_NAME and n.isprintable() else shown(n) for n in names)


def _schema(model: type[BaseModel]) -> Mapping[str, Any]:
    try:
        return model.model_json_schema()
    except PydanticUserError:  # a plugin's options may have types without a JSON schema
        return {}


def _walk(
    schema: Mapping[str, Any], loc: Sequence[int | str]
) -> tuple[list[int | str], Mapping[str, Any]]:
    """Return the part of `loc` that names fields, and the schema of the last field."""
    path: list[int | str] = []
    node, defs = schema, schema.get("$defs", {})
    for key in loc[:-2] if loc[-1:] == ("[key]",) else loc:
        inner = next(
            (n for n in (_step(one, key) for one in _branches(node, defs)) if n is not None), None
        )
        if inner is None:
            break
        path.append(key)
        node = inner
    defaults = {"default": node["default"]} if "default" in node else {}
    branches = _branches(node, defs)
    return path, {**branches[0], **defaults} if len(branches) == 1 else {**node, "anyOf": branches}


def _branches(node: Mapping[str, Any], defs: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if "$ref" in node:
        return [defs[node["$ref"].rpartition("/")[2]]]
    return (
        [branch for one in node["anyOf"] for branch in _branches(one, defs)]
        if "anyOf" in node
        else [node]
    )


def _step(node: Mapping[str, Any], key: int | str) -> Mapping[str, Any] | None:
    if key == "[key]":
        inner = None
    elif isinstance(key, int) and "items" in node:
        inner = node["items"]
    else:
        inner = node.get("properties", {}).get(key, node.get("additionalProperties"))
    return inner if isinstance(inner, Mapping) else None


def _choices(node: Mapping[str, Any]) -> list[Any]:
    if "anyOf" in node:
        return [choice for one in node["anyOf"] for choice in _choices(one)]
    return [node["const"]] if "const" in node else list(node.get("enum", ()))


def allowed_values(node: Mapping[str, Any]) -> str:
    """Return the allowed values of a field in words; "" when its schema does not limit them."""
    if "anyOf" in node:
        branches = sorted(node["anyOf"], key=lambda one: one.get("type") == "null")
        texts = list(dict.fromkeys(text for text in map(allowed_values, branches) if text))
        return f"{', '.join(texts[:-1])}, or {texts[-1]}" if len(texts) > 1 else "".join(texts)
    if choices := _choices(node):
        *most, last = map(str, choices)
        return f"{', '.join(most)} or {last}" if most else last
    kind = node.get("type")
    if kind in ("integer", "number"):
        return _range("a whole number" if kind == "integer" else "a number", node)
    if kind == "array":
        inner = allowed_values(node.get("items", {}))
        is_plain = inner.startswith("a ") and " of" not in inner and " that" not in inner
        what = f"a list of {inner.removeprefix('a ')}s" if is_plain else "a list"
        return f"{what} that is not empty" if node.get("minItems") else what
    if kind == "object" and "properties" in node:
        return f"a name, or a section with {' and '.join(node['properties'])}"
    words = {"boolean": "true or false", "null": "none", "object": "a table of keys and values"}
    if kind == "string":
        return "a text that is not empty" if node.get("minLength") else "a text"
    return words.get(str(kind), "")


def _range(what: str, node: Mapping[str, Any]) -> str:
    if "minimum" in node and "maximum" in node:
        bounds = [f"from {_digits(node['minimum'])} to {_digits(node['maximum'])}"]
    else:
        names = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "at most"}
        names |= {"exclusiveMaximum": "below"}
        bounds = [f"{words} {_digits(node[name])}" for name, words in names.items() if name in node]
    if "multipleOf" in node:
        bounds.append(f"a multiple of {_digits(node['multipleOf'])}")
    return f"{what} {', '.join(bounds)}" if bounds else what


def _digits(number: float) -> str:
    if number == 2**63:
        return "2**63"
    return f"{number:g}" if isinstance(number, float) else str(number)
