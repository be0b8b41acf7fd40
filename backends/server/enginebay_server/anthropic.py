"""/v1/messages: Anthropic's API. The server converts each body to a chat, and answers with content
blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from enginebay.contracts.output_format import ContentDelta
from enginebay.errors import shown
from enginebay.outputs import RequestOutput, StreamChunk
from enginebay.types import SamplingParams
from enginebay_server.api_fields import MESSAGE_FIELDS
from enginebay_server.blocks import Block, BlockEvent, Blocks, whole_blocks
from enginebay_server.bodies import Body, Stops
from enginebay_server.chat import ChatBody
from enginebay_server.errors import ApiError
from enginebay_server.field_limits import Name, Object, Objects, Tools
from enginebay_server.generation import Generation
from enginebay_server.messages_in import content_text, with_one_system
from enginebay_server.parsing.calls import loads
from enginebay_server.sampling_fields import sampling_field
from enginebay_server.sse import StreamWriter
from enginebay_server.stopped import stop_reason
from enginebay_server.tools import ToolUse, left_out
from enginebay_server.usage import Usage

FAILED = "Error: "
"""Begins the content of the result of a tool call that failed."""


BILLING = "x-anthropic-billing-header:"
"""Begins a system text that is no instruction. Its checksum differs from request to request, so it
would keep prompts out of the prefix cache.
"""

NOT_SHOWN_BLOCKS = frozenset(
    {
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "advisor_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
        "container_upload",
        "fallback",
        "tool_addition",
        "tool_removal",
    }
)
"""Blocks of tools and services that Anthropic runs. The model does not see them."""


class AnswerSchema(BaseModel):
    """The JSON schema that an answer must match."""

    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """How the model answers. `effort` is a variable for chat templates that use it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    effort: Name | None = None
    format: AnswerSchema | None = None
    task_budget: dict[str, Any] | None = None
    """Ignored, and named in the header: models here are not told the token budget of a task."""


class CountBody(Body):
    """A conversation in Anthropic's form."""

    api_fields = MESSAGE_FIELDS

    model: Name | None = None
    messages: Objects = Field(min_length=1)
    system: str | Objects | None = None
    tools: Tools | None = None
    tool_choice: Object | None = None
    output_config: OutputConfig | None = None
    output_format: AnswerSchema | None = None
    """The former place of `output_config.format`."""

    @property
    def ignored_parts(self) -> list[str]:
        """The names of parts that change no answer, for the header of ignored fields."""
        config = self.output_config
        parts = (
            [] if config is None or config.task_budget is None else ["output_config.task_budget"]
        )
        blocks = {
            f"messages.{block['type']}"
            for message in self.messages
            if isinstance(message.get("content"), list)
            for block in message["content"]
            if isinstance(block, dict) and str(block.get("type")) in NOT_SHOWN_BLOCKS
        }
        return [*parts, *blocks, *left_out(map(_tool, self.tools or ()))]

    def as_chat(self, **others: Any) -> ChatBody:
        """Return the same conversation in OpenAI's format. Raises ApiError for a malformed part.

        A final message of the assistant is the beginning of the answer, which continues it.
        """
        messages: list[dict[str, Any]] = []
        for place, message in enumerate(self.messages):
            messages += _chat_messages(place, message)
        messages = with_one_system(messages, [_system_text(self.system)])
        choice = self.tool_choice or {}
        form = (self.output_config and self.output_config.format) or self.output_format
        if form is not None:
            schema = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
            others["response_format"] = schema
        ends_with_answer = self.messages[-1].get("role") == "assistant"
        if ends_with_answer and messages and _is_begun(messages[-1]):
            others |= {"continue_final_message": True, "add_generation_prompt": False}
        return ChatBody(
            model=self.model,
            messages=messages,
            tools=None if self.tools is None else [_tool(tool) for tool in self.tools],
            tool_choice=_choice(choice, self.tools or ()),
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


def _system_text(system: str | Sequence[Mapping[str, Any]] | None) -> str:
    """Return the text of the field `system`, without a text for billing."""
    if isinstance(system, str) or system is None:
        return system or ""
    texts = [content_text([block], "system") for block in system]
    return "".join(text for text in texts if not text.startswith(BILLING))


def _choice(
    given: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> str | dict[str, Any] | None:
    kind = given.get("type", "auto")
    if kind == "tool":
        named = next((tool for tool in tools if tool.get("name") == given.get("name")), {})
        if not _is_client_tool(named):
            return {"type": str(named["type"])}
        return {"type": "function", "function": {"name": given.get("name")}}
    names = {"any": "required", "auto": None, "none": "none"}
    if kind not in names:
        raise ApiError(
            400,
            f"tool_choice of type {shown(kind)}. Allowed: auto, any, tool or none.",
            param="tool_choice",
        )
    return names[kind]


def _is_client_tool(tool: Mapping[str, Any]) -> bool:
    """Return whether a client describes and runs a tool."""
    return tool.get("type") in (None, "custom")


def _tool(given: Mapping[str, Any]) -> dict[str, Any]:
    if not _is_client_tool(given):
        return {"type": str(given["type"])}
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
    systems: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    thoughts: list[str] = []
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
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "mid_conv_system":
            systems.append({"role": "system", "content": block.get("content")})
        elif (text := _other_text(block)) is not None:
            texts.append(text)
        elif kind not in ("redacted_thinking", *NOT_SHOWN_BLOCKS):
            param = f"messages.{place}.content.{number}"
            raise ApiError(
                400,
                f"{param} of type {shown(kind)}. Allowed: text, tool_use, tool_result, thinking, "
                "and documents and search results of text. Models here read text alone.",
                param=param,
            )
    message: dict[str, Any] = {"role": given.get("role"), "content": "".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if any(thoughts) and message["role"] == "assistant":
        message["reasoning_content"] = "".join(thoughts)
    is_empty = not texts and not calls and (results or systems)
    return [*systems, *results, *([] if is_empty else [message])]


def _other_text(block: Any) -> str | None:
    """Return the text of a block that has text in another form: a document, a result of a search, a
    summary of earlier messages, the name of a tool. None for any other block.
    """
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "document":
        source = block.get("source")
        source = source if isinstance(source, dict) else {}
        found = source.get("data") if source.get("type") == "text" else source.get("content")
        if not isinstance(found, str | list):
            return None
        text = content_text(found, "messages.content.source")
        title = block.get("title")
        return f"{title}\n{text}" if isinstance(title, str) else text
    if kind == "search_result":
        head = [str(block[name]) for name in ("title", "source") if block.get(name)]
        return "\n".join([*head, content_text(block.get("content"), "messages.content.content")])
    field = {"compaction": "content", "tool_reference": "tool_name"}.get(str(kind))
    other = None if field is None else block.get(field)
    return other if isinstance(other, str) else None


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a tool result. That of a failed call says so: few chat templates read
    `is_error`.
    """
    content = block.get("content")
    if isinstance(content, list):
        content = [_text_part(one) for one in content]
    if not block.get("is_error"):
        return {"content": content}
    given = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    if not isinstance(given, list):
        return {"content": content}
    return {"content": [{"type": "text", "text": FAILED}, *given], "is_error": True}


def _text_part(part: Any) -> Any:
    """Return a part of a result as text, where it is text in another form."""
    text = _other_text(part)
    return part if text is None else {"type": "text", "text": text}


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
        signature = {"type": "signature_delta", "signature": ""}
        signed = event("content_block_delta", {"index": block.index, "delta": signature})
        end = event("content_block_stop", {"index": block.index})
        return signed + end if block.kind == "reasoning" else end
    kind, field = DELTAS[block.kind]
    delta = {"type": kind, field: text}
    return event("content_block_delta", {"index": block.index, "delta": delta})
