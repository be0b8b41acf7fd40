"""Reads tool calls from JSON values, in the spellings that models use."""

from __future__ import annotations

import dataclasses
import json
import secrets
import string
import uuid
from collections.abc import Callable, Collection
from typing import Any, NoReturn, TypeGuard

from enginebay.contracts.output_format import Delta, ToolArgumentsDelta, ToolCallStart

ARGUMENT_KEYS = ("arguments", "parameters")
CALL_KEYS = frozenset({*ARGUMENT_KEYS, "name", "type", "id", "function"})
"""Keys with which the object of a call may begin."""


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A tool call; `arguments` is the text of a JSON object."""

    name: str
    arguments: str
    id: str | None = None
    """The id that the model wrote, if any."""


def new_id() -> str:
    """Return an id in the format of OpenAI."""
    return f"call_{uuid.uuid4().hex[:24]}"


def mistral_id() -> str:
    """Return nine letters and digits; Mistral's chat templates require this format."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class CallWriter:
    """Numbers the calls of one completion, and gives each an id of its own."""

    def __init__(self, make_id: Callable[[], str] = new_id) -> None:
        self._make_id = make_id
        self._ids: set[str] = set()

    def deltas(self, call: Call) -> list[Delta]:
        """Return a whole call as deltas. An id that the model wrote twice is replaced."""
        index, given_id = len(self._ids), call.id
        if given_id is None or given_id in self._ids:
            given_id = self._make_id()
        self._ids.add(given_id)
        return [
            ToolCallStart(index, given_id, call.name),
            ToolArgumentsDelta(index, call.arguments),
        ]


def loads(text: str) -> Any:
    """Return the value of a JSON text, whose strings may have line breaks.

    Raises ValueError for other texts, and for NaN and Infinity.
    """
    return json.loads(text, strict=False, parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def calls_of(value: Any, names: Collection[str] | None = None) -> list[Call]:
    """Return the calls in an object or a list of objects.

    The result is empty when a part is not a call, or calls a tool that is not in `names`.
    """
    found = [_call_of(one, names) for one in (value if isinstance(value, list) else [value])]
    return [] if None in found else [call for call in found if call is not None]


def _call_of(value: Any, names: Collection[str] | None) -> Call | None:
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = {**value, **value["function"]}
    name, given_id = value.get("name"), value.get("id")
    if not is_name(name) or (names is not None and name not in names):
        return None
    arguments = arguments_of(next((value[key] for key in ARGUMENT_KEYS if key in value), None))
    if arguments is None:
        return None
    return Call(name, arguments, given_id if is_name(given_id) else None)


def is_name(value: Any) -> TypeGuard[str]:
    """Return whether a value can be a name or an id.

    It must be text without half of a UTF-16 pair, because an answer cannot contain one.
    """
    return isinstance(value, str) and bool(value) and value.isprintable()


def arguments_of(value: Any) -> str | None:
    """Return the arguments of a call as JSON text; None for an invalid value.

    Valid values are an object, the JSON text of an object, and None for no arguments.
    """
    try:
        value = loads(value) if isinstance(value, str) else value
        value = {} if value is None else value
        if not isinstance(value, dict):
            return None
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    if any("\ud800" <= char <= "\udfff" for char in text):
        return json.dumps(value)  # halves of UTF-16 pairs are escaped
    return text
