"""Log lines: one line for each message, whatever outside text is in it."""

from __future__ import annotations

import logging


def one_line(text: str) -> str:
    """Return a text with every character that is not printable as an escape: a line
    end would begin a line of its own, and an escape sequence would change what a terminal shows.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


class OneLineFormatter(logging.Formatter):
    """Formats a record whose message is one line. A traceback follows on lines of its own, each
    with its own characters escaped.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line of a record, without its traceback."""
        return one_line(super().formatMessage(record))

    def formatException(self, ei: object) -> str:
        """Return a traceback: lines that a message in it forges are indented as all others are."""
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join(f"  {one_line(line)}" for line in text.split("\n"))
