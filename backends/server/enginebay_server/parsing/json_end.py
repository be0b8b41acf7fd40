"""JsonEnd: finds the end of a JSON object or list in text that arrives in pieces."""

from __future__ import annotations

import re

MAX_DEPTH = 128
"""Max depth of nested objects and lists; tool calls have a few levels."""

_SPECIAL = re.compile(r'["{}\[\]]|[^\s,:0-9.eE+\-trufalsn]')
"""Matches, outside of strings, brackets, quotes, and characters that JSON does not allow there."""
_IN_STRING = re.compile(r'["\\]')
_CLOSES = {"}": "{", "]": "["}


class NotJsonError(ValueError):
    """The text is not JSON, whatever follows. The parser that catches it returns it as content."""


class JsonEnd:
    """Reads one value from its first bracket on. It checks brackets and strings only; json.loads
    finds other faults.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._is_in_string = self._is_escaped = False

    def find(self, text: str, start: int) -> int | None:
        """Return the index after the value's last bracket; None if it is not in this text.

        Each text is passed once, and read from `start` on. Raises NotJsonError as soon as the value
        cannot be JSON.
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
