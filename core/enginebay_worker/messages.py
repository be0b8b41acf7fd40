"""Messages between a worker and its parent: JSON, or plain bytes, behind their length in eight
bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, BinaryIO

SIZE_BYTES = 8

IS_BYTES = 1 << 63
"""Bit of the length that says that plain bytes follow, not JSON."""


def read_message(pipe: BinaryIO) -> Any:
    """The next message, `bytes` for plain ones. EOFError at the end of the pipe."""
    size = pipe.read(SIZE_BYTES)
    if len(size) < SIZE_BYTES:
        raise EOFError
    marked = int.from_bytes(size, "big")
    content = pipe.read(marked & ~IS_BYTES)
    return content if marked & IS_BYTES else json.loads(content)


def frame_bytes(content: bytes) -> bytes:
    """Plain bytes as they go through a pipe."""
    return (len(content) | IS_BYTES).to_bytes(SIZE_BYTES, "big") + content


def frame(message: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    """A message as it goes through a pipe. TypeError and ValueError for what is no JSON,
    RecursionError for too deep a value.
    """
    text = json.dumps(message, default=default).encode()
    return len(text).to_bytes(SIZE_BYTES, "big") + text
