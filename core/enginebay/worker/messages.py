"""Messages between a worker and its parent: JSON behind its length in eight bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, BinaryIO

SIZE_BYTES = 8


def read_message(pipe: BinaryIO) -> Any:
    """The next message. EOFError at the end of the pipe."""
    size = pipe.read(SIZE_BYTES)
    if len(size) < SIZE_BYTES:
        raise EOFError
    return json.loads(pipe.read(int.from_bytes(size, "big")))


def frame(message: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    """A message as it goes through a pipe. TypeError and ValueError for what is no JSON,
    RecursionError for too deep a value.
    """
    text = json.dumps(message, default=default).encode()
    return len(text).to_bytes(SIZE_BYTES, "big") + text
