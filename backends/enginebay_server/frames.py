"""Frames: the JSON of a stream's events, of which all but the text of a token is prepared once."""

from __future__ import annotations

from typing import Any

import orjson

from enginebay_server.bodies import StreamOptions
from enginebay_server.usage import Usage


class Frames:
    """The events of one stream of OpenAI's form, with the usage that the client asked for."""

    def __init__(self, head: dict[str, Any], options: StreamOptions | None, usage: Usage) -> None:
        """`head`: the fields that every event has, such as id and model."""
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._options = options or StreamOptions()
        self._usage = usage

    def text_prefix(self, index: int, field: bytes) -> bytes:
        """The beginning of an event of a choice, up to the text. `field` is JSON up to the text."""
        return self._head + b'{"index":%d,' % index + field

    def text(self, prefix: bytes, text: str, field_end: bytes) -> bytes:
        """An event that has new text alone. `field_end` closes what `field` has opened."""
        rest = field_end + b',"logprobs":null,"finish_reason":null}]'
        return prefix + orjson.dumps(text) + rest + self.tail()

    def choice(self, choice: dict[str, Any]) -> bytes:
        """An event of a choice with any fields."""
        return self._head + orjson.dumps(choice) + b"]" + self.tail()

    def tail(self) -> bytes:
        """The end of an event: the usage so far, null, or nothing."""
        if self._options.continuous_usage_stats:
            return b',"usage":' + orjson.dumps(self._usage.record) + b"}\n\n"
        return b',"usage":null}\n\n' if self._options.include_usage else b"}\n\n"

    def last(self) -> bytes:
        """The event that has the usage of the whole stream, if the client asked for it."""
        if not self._options.include_usage:
            return b""
        return self._head + b'],"usage":' + orjson.dumps(self._usage.record) + b"}\n\n"
