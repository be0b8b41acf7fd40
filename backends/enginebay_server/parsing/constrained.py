"""Calls that a request demands: the schema that holds the output to them, and their parser."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from enginebay_server.parsing.calls import loads, new_id
from enginebay_server.parsing.contract import (
    ContentDelta,
    Delta,
    Parser,
    ToolArgumentsDelta,
    ToolCallStart,
)
from enginebay_server.parsing.json_end import JsonEnd, NotJsonError

NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
"""The parameters of a tool that declares none."""

_HEAD = re.compile(
    r'\s*\}?\s*[\[,]\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)'
)


def arguments_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an output that is the arguments of a tool."""
    return {**(tool.get("parameters") or NO_ARGUMENTS), "type": "object"}


def calls_schema(tools: Sequence[Mapping[str, Any]], *, several: bool) -> dict[str, Any]:
    """The schema of an output that is a list of calls of these tools: one, or with `several` one or
    more.
    """
    places = {f"tool{number}": tool for number, tool in enumerate(tools)}
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["name"]},
                "arguments": {"$ref": f"#/$defs/{place}"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for place, tool in places.items()
    ]
    schemas = {
        place: _moved(arguments_schema(tool), f"#/$defs/{place}") for place, tool in places.items()
    }
    most = {} if several else {"maxItems": 1}
    return {
        "type": "array",
        "items": {"anyOf": calls},
        "minItems": 1,
        **most,
        "$defs": schemas,
    }


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to itself lead to its new place."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for key, value in schema.items()
    }


class NamedCallParser(Parser):
    """The whole output is the arguments of one call, given out as they come."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def feed(self, text: str) -> list[Delta]:
        """The call begins with the first text."""
        start: list[Delta] = []
        if text and not self._has_begun:
            self._has_begun = True
            start = [ToolCallStart(0, new_id(), self._name)]
        return [*start, ToolArgumentsDelta(0, text)] if text else []

    def finish(self) -> list[Delta]:
        """Nothing is held back."""
        return []


class CallListParser(Parser):
    """The output is a list by `calls_schema`: names and arguments are given out as they come. What
    is no part of a call whose arguments have begun is content when it is cut off.
    """

    def __init__(self) -> None:
        self._raw = ""
        self._num_calls = 0
        self._json: JsonEnd | None = None
        """Follows the arguments of a call; None between two calls."""

    def feed(self, text: str) -> list[Delta]:
        """What is certain with this piece."""
        self._raw += text
        deltas: list[Delta] = []
        while self._raw:
            if self._json is None:
                match = _HEAD.match(self._raw)
                if match is None:
                    break
                index = self._num_calls
                deltas.append(ToolCallStart(index, new_id(), str(loads(match[1]))))
                self._num_calls += 1
                self._json, self._raw = JsonEnd(), self._raw[match.end() :]
            deltas += self._arguments(self._json)
        return deltas

    def _arguments(self, json_end: JsonEnd) -> list[Delta]:
        try:
            end = json_end.find(self._raw, 0)
        except NotJsonError:
            end = 0  # nothing that a constraint allows: the rest is content
        text = self._raw if end is None else self._raw[:end]
        self._raw = self._raw[len(text) :]
        if end is not None:
            self._json = None
        return [ToolArgumentsDelta(self._num_calls - 1, text)] if text else []

    def finish(self) -> list[Delta]:
        """What was cut off before the arguments of a call."""
        rest = self._raw.strip("}], \t\r\n") if self._num_calls else self._raw
        return [ContentDelta(self._raw)] if rest else []
