"""TextBeforeMarks: the text up to the next of some marks, such as <tool_call>, in text that comes
in pieces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """A mark that was found: with the white space before it, and the text behind it."""

    text: str
    rest: str


class TextBeforeMarks:
    """Gives text out as it comes, and holds back white space and what may be part of a mark: a mark
    takes the white space around it away.
    """

    def __init__(self, marks: Sequence[str], *, strips: bool = False) -> None:
        """With `strips` white space at the beginning is left out."""
        self._marks = tuple(marks)
        self._strips = strips
        self._held = ""

    def feed(self, text: str) -> tuple[str, Mark | None]:
        """The text that is certain, and the first mark. After a mark nothing more is fed."""
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
        """What is held back."""
        return self._held

    def _start_of_partial(self, text: str) -> int:
        """Where the longest end of `text` begins that a mark begins with; its length without."""
        if not self._marks:
            return len(text)
        longest = max(map(len, self._marks))
        for start in range(max(0, len(text) - longest + 1), len(text)):
            if any(mark.startswith(text[start:]) for mark in self._marks):
                return start
        return len(text)
