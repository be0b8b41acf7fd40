"""Messages between a worker and its parent: JSON or plain bytes, preceded by their length in eight
bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, BinaryIO

SIZE_BYTES = 8

IS_BYTES = 1 << 63
"""Bit of the length that marks plain bytes instead of JSON."""


def read_message(pipe: BinaryIO) -> Any:
    """Read the next message, `bytes` for plain bytes. EOFError at the end of the pipe."""
    size = pipe.read(SIZE_BYTES)
    if len(size) < SIZE_BYTES:
        raise EOFError
    marked = int.from_bytes(size, "big")
    content = pipe.read(marked & ~IS_BYTES)
    return content if marked & IS_BYTES else json.loads(content)


def frame_bytes(content: bytes) -> bytes:
    """Return plain bytes as they are written to a pipe."""
    return (len(content) | IS_BYTES).to_bytes(SIZE_BYTES, "big") + content


def frame(message: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    """Return a message as it is written to a pipe. TypeError and ValueError for a value that is not
    JSON, RecursionError for a value that is nested too deeply.
    """
    text = json.dumps(message, default=default).encode()
    return len(text).to_bytes(SIZE_BYTES, "big") + text
