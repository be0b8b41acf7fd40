"""Converts tokens and masks to bytes for the process that computes masks, and back."""

from __future__ import annotations

import base64
import dataclasses
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

HEAD = struct.Struct("<II")
"""The head of each answer: its kind, and the number of bytes after the head, a multiple of four."""

UNKNOWN, REFUSED, MASK, MAY_END, IS_DONE = 0, 1, 2, 4, 8
"""Kinds of answers. A MASK answer may also have the bits MAY_END and IS_DONE."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mask:
    """The tokens that may come next, uint32 [words of the vocabulary], and whether the text may or
    must end.
    """

    bits: np.ndarray
    may_end: bool
    is_done: bool

    @classmethod
    def read(cls, answer: dict[str, Any]) -> Mask:
        """Make a mask from JSON."""
        bits = np.frombuffer(base64.b64decode(answer["bits"]), np.uint32)
        return cls(bits, answer["may_end"], answer["is_done"])

    def as_json(self) -> dict[str, Any]:
        """Return the mask as JSON for `read`."""
        bits = base64.b64encode(self.bits).decode()
        return {"bits": bits, "may_end": self.may_end, "is_done": self.is_done}


Answer = Mask | str | None
"""The mask after the tokens, a refusal, or None for a constraint that the process does not know."""


def pack_orders(dropped: Sequence[int], orders: Sequence[tuple[int, int]]) -> bytes:
    """Pack keys of constraints to forget, and a (key, new token) pair for each constraint to
    continue.
    """
    numbers = [number for order in orders for number in order]
    return struct.pack(f"<{1 + len(dropped) + len(numbers)}Q", len(dropped), *dropped, *numbers)


def unpack_orders(content: bytes) -> tuple[Sequence[int], Iterable[tuple[int, int]]]:
    """Unpack the result of `pack_orders`."""
    num_dropped, *numbers = struct.unpack(f"<{len(content) // 8}Q", content)
    orders = numbers[num_dropped:]
    return numbers[:num_dropped], zip(orders[::2], orders[1::2], strict=True)


def pack_answers(answers: Iterable[Answer]) -> bytes:
    """Pack the answers to orders, in order."""
    parts: list[bytes] = []
    for answer in answers:
        kind, content = UNKNOWN, b""
        if isinstance(answer, Mask):
            kind = MASK | MAY_END * answer.may_end | IS_DONE * answer.is_done
            content = answer.bits.tobytes()
        elif answer is not None:
            kind, content = REFUSED, answer.encode(errors="backslashreplace")
            content += b" " * (-len(content) % 4)
        parts += (HEAD.pack(kind, len(content)), content)
    return b"".join(parts)


def unpack_answers(content: memoryview) -> list[Answer]:
    """Unpack the result of `pack_answers`. The masks are views of `content`."""
    answers: list[Answer] = []
    at = 0
    while at < len(content):
        kind, size = HEAD.unpack_from(content, at)
        at += HEAD.size
        if kind & MASK:
            bits = np.frombuffer(content, np.uint32, size // 4, at)
            answers.append(Mask(bits, bool(kind & MAY_END), bool(kind & IS_DONE)))
        elif kind == REFUSED:
            answers.append(bytes(content[at : at + size]).decode().rstrip(" "))
        else:
            answers.append(None)
        at += size
    return answers
