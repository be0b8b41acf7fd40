"""Limits on the fields of bodies: lists, objects and texts whose length is checked before what is
in them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any

from annotated_types import GroupedMetadata, MaxLen
from pydantic import AfterValidator, BeforeValidator, FailFast, Field
from pydantic_core import PydanticCustomError, PydanticKnownError

MAX_MESSAGES = 16_384
"""Max messages of a chat, max items of an input, and max items of a list within one."""

MAX_TOOLS = 128

LIST_DEPTH = 3
"""How deep in an item, such as a message, the lists have limits."""

MAX_NAME_CHARS = 1024
"""Max characters of a name, such as that of a model or a tenant."""

FIELD_TYPES: dict[type[Any], str] = {list: "List", dict: "Dictionary", str: "String"}


@dataclasses.dataclass(frozen=True, slots=True)
class AtMost(GroupedMetadata):
    """Max items of a list or an object, or characters of a text. It is checked before the items
    are, and of wrong items of a list the first alone is reported.
    """

    count: int
    is_list: bool = True

    def __iter__(self) -> Iterator[Any]:
        yield MaxLen(self.count)  # for /openapi.json
        if self.is_list:
            yield FailFast()
        yield BeforeValidator(self._checked)

    def _checked(self, value: Any) -> Any:
        kind = FIELD_TYPES.get(type(value))
        if kind == "String":
            if len(value) > self.count:
                raise PydanticKnownError("string_too_long", {"max_length": self.count})
        elif kind is not None and len(value) > self.count:
            given = {"field_type": kind, "max_length": self.count, "actual_length": len(value)}
            raise PydanticKnownError("too_long", given)
        return value


def _with_short_lists(item: dict[str, Any], depth: int = LIST_DEPTH) -> dict[str, Any]:
    """Return an item whose lists, such as the parts of a content, are short enough."""
    for name, value in item.items():
        if type(value) is list:
            if len(value) > MAX_MESSAGES:
                given = {"name": name, "max_length": MAX_MESSAGES, "actual_length": len(value)}
                message = "{name} should have at most {max_length} items, not {actual_length}"
                raise PydanticCustomError("too_long", message, given)
            inner = value
        elif type(value) is dict:
            inner = [value]
        else:
            continue
        if depth > 1:
            for one in inner:
                if type(one) is dict:
                    _with_short_lists(one, depth - 1)
    return item


TokenId = Annotated[int, Field(ge=0)]
Name = Annotated[str, AtMost(MAX_NAME_CHARS, is_list=False)]
Object = Annotated[dict[str, Any], AfterValidator(_with_short_lists)]
Objects = Annotated[list[Object], AtMost(MAX_MESSAGES)]
Tools = Annotated[list[Object], AtMost(MAX_TOOLS)]
