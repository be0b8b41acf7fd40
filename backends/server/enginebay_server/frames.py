"""Frames: the JSON of a stream's events. Everything but the text of a token is prepared once."""

from __future__ import annotations

from typing import Any

import orjson

from enginebay_server.bodies import StreamOptions
from enginebay_server.usage import Usage


class Frames:
    """Makes the events of one stream in OpenAI's format, with usage if the client requested it."""

    def __init__(self, head: dict[str, Any], options: StreamOptions | None, usage: Usage) -> None:
        """`head` has the fields of every event, such as id and model."""
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._options = options or StreamOptions()
        self._usage = usage

    def text_prefix(self, index: int, field: bytes) -> bytes:
        """Return the beginning of a choice's event. `field` is the JSON before the text."""
        return self._head + b'{"index":%d,' % index + field

    def text(self, prefix: bytes, text: str, field_end: bytes) -> bytes:
        """Return an event with new text only. `field_end` closes the brackets of `field`."""
        rest = field_end + b',"logprobs":null,"finish_reason":null}]'
        return prefix + orjson.dumps(text) + rest + self.tail()

    def choice(self, choice: dict[str, Any]) -> bytes:
        """Return an event of a choice with any fields."""
        return self._head + orjson.dumps(choice) + b"]" + self.tail()

    def tail(self) -> bytes:
        """Return the end of an event, which may have the usage so far."""
        if self._options.continuous_usage_stats:
            return b',"usage":' + orjson.dumps(self._usage.record) + b"}\n\n"
        return b',"usage":null}\n\n' if self._options.include_usage else b"}\n\n"

    def last(self) -> bytes:
        """Return the event with the usage of the whole stream; b"" if it was not requested."""
        if not self._options.include_usage:
            return b""
        return self._head + b'],"usage":' + orjson.dumps(self._usage.record) + b"}\n\n"
