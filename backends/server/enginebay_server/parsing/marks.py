"""TextBeforeMarks: returns the text up to a mark, such as <tool_call>, in text that arrives in
pieces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """A mark that was found, with the white space before it, and the text after it."""

    text: str
    rest: str


class TextBeforeMarks:
    """Returns text as it arrives, and holds back white space and possible beginnings of marks.

    White space around a mark is dropped.
    """

    def __init__(self, marks: Sequence[str], *, strips: bool = False) -> None:
        """With `strips`, white space at the beginning is dropped."""
        self._marks = tuple(marks)
        self._strips = strips
        self._held = ""

    def feed(self, text: str) -> tuple[str, Mark | None]:
        """Add a piece of text, and return (the text that no later text can change, the first mark
        or None). Not called after a mark.
        """
        text = self._held + text
        if self._strips:
            text = text.lstrip()
        found = [(at, -len(mark), mark) for mark in self._marks if (at := text.find(mark)) >= 0]
        if found:
            at, _, mark = min(found)
            end = len(text[:at].rstrip())
            self._held = ""
            return text[:end], Mark(text[end:at] + mark, text[at + len(mark) :])
        end = len(text[: self._start_of_partial(text)].rstrip())
        self._held = text[end:]
        self._strips = self._strips and not end
        return text[:end], None

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._held

    def _start_of_partial(self, text: str) -> int:
        """Return the start of the longest end of `text` that begins a mark; else len(text)."""
        if not self._marks:
            return len(text)
        longest = max(map(len, self._marks))
        for start in range(max(0, len(text) - longest + 1), len(text)):
            if any(mark.startswith(text[start:]) for mark in self._marks):
                return start
        return len(text)
