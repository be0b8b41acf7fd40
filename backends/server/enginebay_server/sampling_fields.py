"""The fields of SamplingParams in the bodies of requests, made from their declarations.

A value of JSON has lists where SamplingParams has tuples. The length of a list is checked before
its items are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import annotated_types
from pydantic import Field

from enginebay.row_value import HttpName, MaxItems, declared
from enginebay.types import MAX_ITEMS, SamplingParams
from enginebay_server.field_limits import AtMost, TokenId

_OTHER_NAMES = declared(SamplingParams, HttpName)

HTTP_NAMES: Mapping[str, str] = {
    field: name
    for field in SamplingParams.model_fields
    if (name := _OTHER_NAMES[field].name if field in _OTHER_NAMES else field) is not None
}
"""Field of SamplingParams -> its name in chats and completions, for the fields that they carry."""

_BOUNDS = (
    annotated_types.Ge,
    annotated_types.Gt,
    annotated_types.Le,
    annotated_types.Lt,
    annotated_types.MinLen,
)


def sampling_field(name: str) -> Any:
    """Return pydantic's Field for a field of SamplingParams: None by default, with its bounds and
    its description.
    """
    field = SamplingParams.model_fields[name]
    bounds: dict[str, Any] = {}
    for one in field.metadata:
        if isinstance(one, _BOUNDS):
            bounds |= dataclasses.asdict(one)
    return Field(default=None, description=field.description, **bounds)


def json_fields() -> dict[str, Any]:
    """Return type and Field of each field that chats and completions carry, by its name there."""
    found: dict[str, Any] = {}
    for field, name in HTTP_NAMES.items():
        annotation = SamplingParams.model_fields[field].annotation
        found[name] = (json_type(annotation, MAX_ITEMS.get(field)) | None, sampling_field(field))
    return found


def json_type(annotation: Any, limit: MaxItems | None) -> Any:
    """Return the type in JSON of a field with this annotation. TypeError for a list without a
    limit.
    """
    kind, inner = get_origin(annotation), get_args(annotation)
    if kind is None:
        return annotation
    if kind in (Union, UnionType):
        return Union[tuple(json_type(one, limit) for one in inner)]  # noqa: UP007  # from a tuple
    if kind is dict and inner[0] is str:
        return annotation
    if limit is not None and kind is tuple:
        return Annotated[list[_item_type(inner[0], limit)], AtMost(limit.items)]  # type: ignore[misc]
    if limit is not None and kind is dict:  # the keys of JSON are texts
        return Annotated[dict[str, float], AtMost(limit.items, is_list=False)]
    raise TypeError(f"no type of JSON for {annotation}: declare MaxItems, or HttpName(None)")


def _item_type(annotation: Any, limit: MaxItems) -> Any:
    """Return the type of the items of a list: token ids, or texts."""
    kind = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    if kind is str and limit.chars is not None:
        return Annotated[str, AtMost(limit.chars, is_list=False)]
    return TokenId if kind is int else kind
