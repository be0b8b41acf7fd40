"""Replies: a chat's completions as messages, or as deltas of a stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

from enginebay.contracts.output_format import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallStart,
)
from enginebay_server.parsing.message import MessageParser


@dataclasses.dataclass(slots=True)
class ToolCall:
    """A tool call; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str = ""


@dataclasses.dataclass(slots=True)
class Reply:
    """The content, reasoning and calls of an answer so far."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = dataclasses.field(default_factory=list)

    def add(self, deltas: Iterable[Delta]) -> None:
        """Add deltas."""
        for delta in deltas:
            match delta:
                case ContentDelta(text):
                    self.content += text
                case ReasoningDelta(text):
                    self.reasoning += text
                case ToolCallStart(_, call_id, name):
                    self.calls.append(ToolCall(call_id, name))
                case ToolArgumentsDelta(index, text):
                    self.calls[index].arguments += text


def whole_reply(text: str, parser: MessageParser | None) -> Reply:
    """Parse a whole text. `parser` must be new; with None the text is the content."""
    if parser is None:
        return Reply(text)
    reply = Reply()
    reply.add(parser.feed(text))
    reply.add(parser.finish())
    return reply


def message_record(reply: Reply, custom: Collection[str] = ()) -> dict[str, Any]:
    """Return a reply as a message of OpenAI's chat API. `custom` has the names of custom tools."""
    record: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.reasoning:
        record["reasoning_content"] = reply.reasoning
    if reply.calls:
        record["content"] = reply.content or None
        record["tool_calls"] = [
            {"id": call.id, **_call(call.name, call.arguments, is_custom=call.name in custom)}
            for call in reply.calls
        ]
    return record


def _call(name: str, text: str, *, is_custom: bool) -> dict[str, Any]:
    """Return the fields of a call that depend on the type of its tool."""
    if is_custom:
        return {"type": "custom", "custom": {"name": name, "input": text}}
    return {"type": "function", "function": {"name": name, "arguments": text}}


class DeltaRecords:
    """Converts the deltas of one completion to the format of a stream of OpenAI's chat API."""

    def __init__(self, custom: Collection[str] = ()) -> None:
        """`custom` has the names of custom tools."""
        self._custom = custom
        self._custom_calls: set[int] = set()
        """The numbers of the calls of custom tools so far."""

    def record(self, delta: Delta) -> dict[str, Any]:
        """Return a delta as JSON."""
        match delta:
            case ContentDelta(text):
                return {"content": text}
            case ReasoningDelta(text):
                return {"reasoning_content": text}
            case ToolCallStart(index, call_id, name):
                is_custom = name in self._custom
                if is_custom:
                    self._custom_calls.add(index)
                call = _call(name, "", is_custom=is_custom)
                return {"tool_calls": [{"index": index, "id": call_id, **call}]}
            case ToolArgumentsDelta(index, text):
                if index in self._custom_calls:
                    return {"tool_calls": [{"index": index, "custom": {"input": text}}]}
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def finish_reason(reason: str | None, num_calls: int, *, is_cut: bool = False) -> str | None:
    """Return the finish reason of an answer.

    It is "tool_calls" for an answer with calls, unless the last call was cut off: by the length,
    or, with `is_cut`, by a stop text.
    """
    return "tool_calls" if num_calls and reason == "stop" and not is_cut else reason
