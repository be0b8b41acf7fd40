"""JsonEnd: where a JSON object or list ends, in text that comes in pieces."""

from __future__ import annotations

import re

MAX_DEPTH = 128
"""Nested objects and lists of one value at most; tool calls have a few."""

_SPECIAL = re.compile(r'["{}\[\]]|[^\s,:0-9.eE+\-trufalsn]')
"""Outside of strings: where the structure changes, or a character that JSON does not have there."""
_IN_STRING = re.compile(r'["\\]')
_CLOSES = {"}": "{", "]": "["}


class NotJsonError(ValueError):
    """A text that is no JSON, whatever follows. The parser that catches it passes the text on."""


class JsonEnd:
    """Follows one value from its first bracket on. It checks brackets and strings; json.loads finds
    other faults.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._is_in_string = self._is_escaped = False

    def find(self, text: str, start: int) -> int | None:
        """The place after the value's last bracket, or None when it lies behind this text. Each
        text is given once; `start` is where to begin in it. NotJsonError as soon as it is none.
        """
        at = start
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            match = (_IN_STRING if self._is_in_string else _SPECIAL).search(text, at)
            if match is None:
                return None
            char, at = match[0], match.end()
            if self._is_in_string:
                self._is_escaped = char == "\\"
                self._is_in_string = char != '"'
            elif char == '"':
                self._is_in_string = True
            elif char in "{[":
                self._open.append(char)
                if len(self._open) > MAX_DEPTH:
                    raise NotJsonError(f"more than {MAX_DEPTH} nested values")
            elif char in _CLOSES and self._open and self._open.pop() == _CLOSES[char]:
                if not self._open:
                    return at
            else:
                raise NotJsonError(f"{char!r} outside of a string")
        return None
