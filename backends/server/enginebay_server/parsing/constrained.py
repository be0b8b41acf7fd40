"""Tool calls that a request demands: the JSON schema that makes the model write them, and the
parser that reads them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from enginebay.contracts.output_format import (
    ContentDelta,
    Delta,
    Parser,
    ToolArgumentsDelta,
    ToolCallStart,
)
from enginebay_server.parsing.calls import loads, new_id
from enginebay_server.parsing.json_end import JsonEnd, NotJsonError

NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
"""The schema of the parameters of a tool without `parameters`."""

_HEAD = re.compile(
    r'\s*\}?\s*[\[,]\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)'
)
_CUT = re.compile(
    r'\s*\}?\s*(?:[\[,]\s*(?:\{(?:[\s:,]|"(?:[^"\\]|\\.)*(?:"|\\?\Z))*)?)?\]?\s*\Z', re.DOTALL
)
"""A list of calls that is cut off between two calls, or before the arguments of one."""


def arguments_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of the arguments of a tool."""
    return {**(tool.get("parameters") or NO_ARGUMENTS), "type": "object"}


def calls_schema(tools: Sequence[Mapping[str, Any]], *, several: bool) -> dict[str, Any]:
    """Return the schema of a list of calls of these tools: one call, or more with `several`."""
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
    """Return a schema whose references are adapted to its new place."""
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
    """The whole output is the arguments of one call; they are returned as they arrive."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def feed(self, text: str) -> list[Delta]:
        """Return the start of the call with the first text, then its arguments."""
        start: list[Delta] = []
        if text and not self._has_begun:
            self._has_begun = True
            start = [ToolCallStart(0, new_id(), self._name)]
        return [*start, ToolArgumentsDelta(0, text)] if text else []

    def finish(self) -> list[Delta]:
        """Return nothing, because no text is held back."""
        return []


class CallListParser(Parser):
    """The output is a list as in `calls_schema`; names and arguments are returned as they arrive.

    The beginning of a call that is cut off before its arguments is left out: no reader wants the
    punctuation of the list. Any other text that is no call is content.
    """

    def __init__(self) -> None:
        self._raw = ""
        self._num_calls = 0
        self._json: JsonEnd | None = None
        """Finds the end of a call's arguments; None between two calls."""

    def feed(self, text: str) -> list[Delta]:
        """Add a piece of text, and return the deltas that no later text can change."""
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
            end = 0  # no constraint allows this text, so the rest is content
        text = self._raw if end is None else self._raw[:end]
        self._raw = self._raw[len(text) :]
        if end is not None:
            self._json = None
        return [ToolArgumentsDelta(self._num_calls - 1, text)] if text else []

    def finish(self) -> list[Delta]:
        """Return text that is no beginning of a call, as content."""
        return [] if _CUT.match(self._raw) else [ContentDelta(self._raw)]
