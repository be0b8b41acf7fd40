"""Splits an answer into blocks of reasoning, text and tool calls, in the order of generation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

from enginebay.contracts.output_format import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallStart,
)
from enginebay_server.parsing.message import MessageParser

BlockKind = Literal["reasoning", "text", "call"]


@dataclasses.dataclass(slots=True)
class Block:
    """A part of an answer. `text` is reasoning, text of the answer, or a call's arguments as a JSON
    object. Only calls have `call_id` and `name`. `logprobs`: what /v1/responses returns for the
    tokens of a text.
    """

    kind: BlockKind
    index: int
    call_id: str = ""
    name: str = ""
    text: str = ""
    logprobs: list[dict[str, Any]] = dataclasses.field(default_factory=list)


BlockEvent = tuple[Literal["open", "add", "close"], Block, str]
"""An event of a block: it opens, it gets more text ("add"), or it closes."""


class Blocks:
    """Builds blocks from deltas. At most one block is open at a time."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    @property
    def num_calls(self) -> int:
        """Tool calls so far."""
        return sum(block.kind == "call" for block in self.all)

    def take(self, deltas: Iterable[Delta]) -> list[BlockEvent]:
        """Add deltas, and return the block events that they cause."""
        events: list[BlockEvent] = []
        for delta in deltas:
            match delta:
                case ContentDelta(text):
                    events += self._add("text", text)
                case ReasoningDelta(text):
                    events += self._add("reasoning", text)
                case ToolCallStart(_, call_id, name):
                    events += self._begin(Block("call", len(self.all), call_id, name))
                case ToolArgumentsDelta(_, text):
                    events += self._add("call", text)
        return events

    def finish(self) -> list[BlockEvent]:
        """Close the open block, if any, and return its event."""
        block, self._open = self._open, None
        return [] if block is None else [("close", block, "")]

    def _begin(self, block: Block) -> list[BlockEvent]:
        events = self.finish()
        self.all.append(block)
        self._open = block
        return [*events, ("open", block, "")]

    def _add(self, kind: BlockKind, text: str) -> list[BlockEvent]:
        events: list[BlockEvent] = []
        if self._open is None or self._open.kind != kind:
            events = self._begin(Block(kind, len(self.all)))
        assert self._open is not None, "a block was begun above"
        self._open.text += text
        return [*events, ("add", self._open, text)]


def whole_blocks(text: str, parser: MessageParser | None) -> Blocks:
    """Return the blocks of a whole text. `parser` must be new; None makes one text block."""
    blocks = Blocks()
    if parser is None:
        blocks.take([ContentDelta(text)] if text else [])
    else:
        blocks.take([*parser.feed(text), *parser.finish()])
    return blocks
