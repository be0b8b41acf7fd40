"""/v1/messages: Anthropic's API. The server converts each body to a chat, and answers with content
blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field

from enginebay.contracts.output_format import ContentDelta
from enginebay.errors import shown
from enginebay.outputs import RequestOutput, StreamChunk
from enginebay.types import SamplingParams
from enginebay_server.blocks import Block, BlockEvent, Blocks, whole_blocks
from enginebay_server.bodies import Body, Stops
from enginebay_server.chat import ChatBody
from enginebay_server.errors import ApiError
from enginebay_server.field_limits import Name, Objects, Tools
from enginebay_server.generation import Generation
from enginebay_server.parsing.calls import loads
from enginebay_server.sampling_fields import sampling_field
from enginebay_server.sse import StreamWriter
from enginebay_server.stopped import stop_reason
from enginebay_server.tools import ToolUse
from enginebay_server.usage import Usage

FAILED = "Error: "
"""Begins the content of the result of a tool call that failed."""


class OutputConfig(BaseModel):
    """How the model answers. `effort` is a variable for chat templates that use it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    effort: str | None = None
    format: None = None


class CountBody(Body):
    """A conversation in Anthropic's form."""

    model: Name | None = None
    messages: Objects = Field(min_length=1)
    system: str | Objects | None = None
    tools: Tools | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    """Accepted and ignored: the chat template decides whether the model reasons."""
    output_config: OutputConfig | None = None

    def as_chat(self, **others: Any) -> ChatBody:
        """Return the same conversation in OpenAI's format. Raises ApiError for a malformed part.

        A final message of the assistant is the beginning of the answer, which continues it.
        """
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        for place, message in enumerate(self.messages):
            messages += _chat_messages(place, message)
        choice = self.tool_choice or {}
        if _is_begun(messages[-1]):
            others |= {"continue_final_message": True, "add_generation_prompt": False}
        return ChatBody(
            model=self.model,
            messages=messages,
            tools=None if self.tools is None else [_tool(tool) for tool in self.tools],
            tool_choice=_choice(choice),
            parallel_tool_calls=not choice.get("disable_parallel_tool_use"),
            reasoning_effort=None if self.output_config is None else self.output_config.effort,
            **others,
        )


class MessagesBody(CountBody):
    """A conversation to answer."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Stops | None = None
    stream: bool | None = None
    temperature: float | None = sampling_field("temperature")
    top_p: float | None = sampling_field("top_p")
    top_k: int | None = sampling_field("top_k")

    @property
    def chat(self) -> ChatBody:
        """The same request in OpenAI's format."""
        return self.as_chat(
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
        )


def _is_begun(message: Mapping[str, Any]) -> bool:
    """Return whether a final message is the beginning of the answer."""
    is_answer = message.get("role") == "assistant" and not message.get("tool_calls")
    return is_answer and bool(message.get("content"))


def _choice(given: Mapping[str, Any]) -> str | dict[str, Any] | None:
    kind = given.get("type", "auto")
    if kind == "tool":
        return {"type": "function", "function": {"name": given.get("name")}}
    names = {"any": "required", "auto": None, "none": "none"}
    if kind not in names:
        raise ApiError(
            400,
            f"tool_choice of type {shown(kind)}. Allowed: auto, any, tool or none.",
            param="tool_choice",
        )
    return names[kind]


def _tool(given: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": given.get("name"),
        "description": given.get("description", ""),
        "parameters": given.get("input_schema"),
    }
    return {"type": "function", "function": function}


def _chat_messages(place: int, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Convert a message to OpenAI's format, in which each tool result is a separate message."""
    content = given.get("content")
    if not isinstance(content, list):
        return [dict(given)]
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for number, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}))}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            result = {"role": "tool", "tool_call_id": block.get("tool_use_id")}
            results.append(result | _result(block))
        elif kind not in ("thinking", "redacted_thinking"):
            param = f"messages.{place}.content.{number}"
            raise ApiError(
                400,
                f"{param} of type {shown(kind)}. Allowed: text, tool_use, tool_result and "
                "thinking. This server takes text only.",
                param=param,
            )
    message: dict[str, Any] = {"role": given.get("role"), "content": "".join(texts)}
    if calls:
        message["tool_calls"] = calls
    return [*results, message] if texts or calls or not results else results


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a tool result. That of a failed call says so: few chat templates read
    `is_error`.
    """
    content = block.get("content")
    if not block.get("is_error"):
        return {"content": content}
    given = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    if not isinstance(given, list):
        return {"content": content}
    return {"content": [{"type": "text", "text": FAILED}, *given], "is_error": True}


def block_record(block: Block, *, is_new: bool = False) -> dict[str, Any]:
    """Return a block in Anthropic's format. With `is_new` the text is empty."""
    text = "" if is_new else block.text
    if block.kind == "text":
        return {"type": "text", "text": text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {
        "type": "tool_use",
        "id": block.call_id,
        "name": block.name,
        "input": _arguments(text),
    }


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call as a dict; {} for a call that was cut off."""
    try:
        found = loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class MessageEnd:
    """Finds Anthropic's stop_reason and stop_sequence of a message that has ended."""

    def __init__(self, generation: Generation, params: SamplingParams) -> None:
        self._model = generation.model
        self._params = params

    def record(
        self, reason: str | None, token_ids: list[int], num_calls: int
    ) -> dict[str, str | int | None]:
        """Return the fields stop_reason and stop_sequence."""
        text = (
            stop_reason(self._model, self._params, token_ids, "stop") if reason == "stop" else None
        )
        if reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if text is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": text}
        return {"stop_reason": "tool_use" if num_calls else "end_turn", "stop_sequence": None}


def usage_record(usage: Usage) -> dict[str, int]:
    """Return the token counts. Tokens found in the prefix cache are counted separately."""
    return {
        "input_tokens": usage.num_prompt - usage.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached,
        "output_tokens": usage.num_new,
    }


def message_answer(
    generation: Generation, params: SamplingParams, use: ToolUse, output: RequestOutput
) -> dict[str, Any]:
    """Return the body of an answer that is not streamed."""
    [one] = output.outputs
    usage = Usage()
    usage.add_output(output)
    blocks = whole_blocks(one.text, use.parser(generation.model, output.prompt_token_ids))
    end = MessageEnd(generation, params)
    return {
        "id": generation.id,
        "type": "message",
        "role": "assistant",
        "model": generation.model.name,
        "content": [block_record(block) for block in blocks.all],
        **end.record(one.finish_reason, one.token_ids, blocks.num_calls),
        "usage": usage_record(usage),
    }


class MessageStream(StreamWriter):
    """Writes the events of a stream in Anthropic's format."""

    def __init__(self, generation: Generation, params: SamplingParams, use: ToolUse) -> None:
        self._generation = generation
        self._usage = Usage(generation.num_prompt_tokens)
        self._parser = use.parser(generation.model, generation.handles[0].prompt_token_ids)
        self._blocks = Blocks()
        self._end = MessageEnd(generation, params)
        self._token_ids: list[int] = []
        self._reason: str | None = None

    def begin(self) -> bytes:
        message: dict[str, Any] = {
            "id": self._generation.id,
            "type": "message",
            "role": "assistant",
            "model": self._generation.model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_record(self._usage),
        }
        return event("message_start", {"message": message})

    def write(self, place: int, chunk: StreamChunk) -> bytes:
        self._usage.add(chunk)
        self._token_ids += chunk.delta_token_ids
        text = chunk.delta_text
        if self._parser is not None:
            deltas = self._parser.feed(text)
        else:
            deltas = [ContentDelta(text)] if text else []
        if chunk.finish_reason is not None:
            self._reason = chunk.finish_reason
            deltas += [] if self._parser is None else self._parser.finish()
        return b"".join(map(_block_event, self._blocks.take(deltas)))

    async def end(self) -> bytes:
        if self._reason in ("abort", "error"):
            raise ApiError(503, "the server ended the request", code="request_aborted")
        closing = b"".join(map(_block_event, self._blocks.finish()))
        delta = self._end.record(self._reason, self._token_ids, self._blocks.num_calls)
        last = {"delta": delta, "usage": usage_record(self._usage)}
        return closing + event("message_delta", last) + event("message_stop", {})

    def fail(self, error: ApiError) -> bytes:
        return event("error", {"error": error.anthropic_body["error"]})


def event(name: str, record: dict[str, Any]) -> bytes:
    """Return a server-sent event. Its data repeat the event's name in the field `type`."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), orjson.dumps({"type": name, **record}))


DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def _block_event(found: BlockEvent) -> bytes:
    what, block, text = found
    if what == "open":
        record = block_record(block, is_new=True)
        return event("content_block_start", {"index": block.index, "content_block": record})
    if what == "close":
        return event("content_block_stop", {"index": block.index})
    kind, field = DELTAS[block.kind]
    delta = {"type": kind, field: text}
    return event("content_block_delta", {"index": block.index, "delta": delta})
