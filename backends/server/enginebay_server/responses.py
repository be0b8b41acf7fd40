"""/v1/responses: the body, which becomes a chat, and the record of an answer."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from enginebay.errors import shown
from enginebay_server.blocks import Block
from enginebay_server.bodies import IGNORED_HEADER, Body
from enginebay_server.chat import ChatBody
from enginebay_server.errors import ApiError
from enginebay_server.field_limits import AtMost, Name, Objects, Tools
from enginebay_server.sampling_fields import sampling_field
from enginebay_server.served import ServedModel
from enginebay_server.usage import Usage

MessageRecord = dict[str, Any]

MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
"""OpenAI's limits on the metadata of a response."""

ResponseMetadata = Annotated[
    dict[
        Annotated[str, AtMost(MAX_KEY_CHARS, is_list=False)],
        Annotated[str, AtMost(MAX_VALUE_CHARS, is_list=False)],
    ],
    AtMost(MAX_METADATA, is_list=False),
]

Include = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ResponseStreamOptions(BaseModel):
    """Options of a stream. No event has padding, so there is nothing to switch off."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_obfuscation: bool | None = None


class ResponsesBody(Body):
    """The body of a POST to /v1/responses: one turn of a conversation."""

    model: Name | None = None
    input: str | Objects
    instructions: str | None = None
    previous_response_id: Name | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = sampling_field("temperature")
    top_p: float | None = sampling_field("top_p")
    stream: bool | None = None
    store: bool | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: ResponseMetadata | None = None
    user: Name | None = None
    truncation: Literal["disabled"] | None = None
    background: bool | None = None
    include: Annotated[list[Include], AtMost(64)] | None = None
    """Accepted, because clients always send it: nothing is encrypted, and no tool of OpenAI runs. A
    header of the answer names it as ignored where it asks for log-probabilities.
    """
    stream_options: ResponseStreamOptions | None = None

    def with_ignored(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the headers of the answer, with `include` among the ignored fields where it asks
        for log-probabilities, which answers do not have.
        """
        if "message.output_text.logprobs" not in (self.include or ()):
            return dict(headers)
        ignored = filter(None, ("include", headers.get(IGNORED_HEADER)))
        return {**headers, IGNORED_HEADER: ", ".join(ignored)}

    @property
    def items(self) -> list[dict[str, Any]]:
        """The input as a list of items."""
        if isinstance(self.input, list):
            return self.input
        part = {"type": "input_text", "text": self.input}
        return [{"type": "message", "role": "user", "content": [part]}]

    def as_chat(self, messages: Sequence[MessageRecord]) -> ChatBody:
        """Return the chat that answers these messages; ApiError for a malformed field."""
        if not messages:
            raise ApiError(
                400,
                "input without a message. Allowed: a text, or a list with one message or more. "
                "Pass an input with a message.",
                param="input",
            )
        if self.background:
            raise ApiError(
                400,
                "background = true. Allowed: false, because answers are made while the client "
                "waits. Leave it out.",
                param="background",
            )
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return ChatBody(
            model=self.model,
            messages=[*system, *messages],
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stream=self.stream,
            tools=None if self.tools is None else list(map(_tool, self.tools)),
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_format(self.text),
            reasoning_effort=_effort(self.reasoning),
            user=self.user,
        )


def input_messages(items: Sequence[Mapping[str, Any]]) -> list[MessageRecord]:
    """Convert input items to the messages of a chat; ApiError for an unknown item."""
    messages: list[MessageRecord] = []
    for place, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind in ("function_call", "custom_tool_call"):
            function = {"name": item.get("name"), "arguments": _arguments(item)}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if messages and messages[-1].get("tool_calls"):
                messages[-1]["tool_calls"].append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind in ("function_call_output", "custom_tool_call_output"):
            message = {"role": "tool", "tool_call_id": item.get("call_id")}
            messages.append({**message, "content": item.get("output")})
        elif kind != "reasoning":
            raise ApiError(
                400,
                f"input.{place} of type {shown(kind)}. Allowed: message, function_call, "
                "function_call_output, custom_tool_call, custom_tool_call_output and reasoning. "
                "Leave it out.",
                param=f"input.{place}",
            )
    return messages


def _arguments(item: Mapping[str, Any]) -> Any:
    """Return the arguments of a call. The text of a custom tool's call is its one argument."""
    if item["type"] == "custom_tool_call":
        return json.dumps({"input": item.get("input", "")})
    return item.get("arguments", "{}")


def _tool(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a function to the format of the chat API; the field `strict` is ignored."""
    if given.get("type") != "function":
        raise ApiError(
            400,
            f"a tool of type {shown(given.get('type'))}. Allowed: function. Leave it out.",
            param="tools",
        )
    names = ("name", "description", "parameters")
    function = {name: given[name] for name in names if given.get(name) is not None}
    return {"type": "function", "function": function}


def _choice(given: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(given, Mapping):
        return {"type": "function", "function": {"name": given.get("name")}}
    return given


def _format(text: Mapping[str, Any] | None) -> Any:
    """Convert a format to the response_format of a chat."""
    form = (text or {}).get("format")
    if form is None:
        return None
    if not isinstance(form, dict):
        raise ApiError(
            400,
            f"text.format = {shown(form)}. Allowed: an object such as "
            '{"type": "text"}. Pass one, or leave it out.',
            param="text.format",
        )
    if form.get("type") == "json_schema":
        inner = {"schema": form.get("schema")}
        if not isinstance(inner["schema"], dict | None):
            raise ApiError(
                400,
                f"text.format.schema = {shown(inner['schema'])}. Allowed: a JSON schema. Pass an "
                "object.",
                param="text.format.schema",
            )
        return {"type": "json_schema", "json_schema": inner}
    if form.get("type") not in ("text", "json_object"):
        raise ApiError(
            400,
            f"text.format of type {shown(form.get('type'))}. Allowed: text, json_object or "
            "json_schema.",
            param="text.format",
        )
    return {"type": form["type"]}


def _effort(reasoning: Mapping[str, Any] | None) -> str | None:
    effort = (reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise ApiError(
            400, f"reasoning.effort = {shown(effort)}. Allowed: a text.", param="reasoning.effort"
        )
    return effort


PREFIXES = {"text": "msg", "call": "fc", "reasoning": "rs"}


class ResponseRecords:
    """The JSON records of one response: at its beginning, of its items, and at its end."""

    def __init__(self, response_id: str, model: ServedModel, body: ResponsesBody) -> None:
        self.id = response_id
        self._model = model
        self._body = body
        self._created_s = int(time.time())

    def item_id(self, block: Block) -> str:
        """The id of the output item that a block (text, reasoning or a call) becomes."""
        return f"{PREFIXES[block.kind]}_{self.id.removeprefix('resp_')}{block.index}"

    def part(self, block: Block) -> dict[str, Any]:
        """The content part of a block of text or reasoning."""
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}

    def item(self, block: Block, status: str = "completed") -> dict[str, Any]:
        """A block as an output item. An item in progress has no content yet."""
        head = {"id": self.item_id(block), "status": status}
        is_new = status == "in_progress"
        if block.kind == "call":
            arguments = "" if is_new else block.text
            call = {"call_id": block.call_id, "name": block.name, "arguments": arguments}
            return {**head, "type": "function_call", **call}
        content = [] if is_new else [self.part(block)]
        if block.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def begun(self) -> dict[str, Any]:
        """The response before its first token."""
        return self._record("in_progress", [], None)

    def ended(self, blocks: Sequence[Block], reason: str | None, usage: Usage) -> dict[str, Any]:
        """The response at its end; with reason "length" it is incomplete, and so is its last
        item.
        """
        status = "incomplete" if reason == "length" else "completed"
        items = [self.item(block) for block in blocks]
        if items:
            items[-1]["status"] = status
        return self._record(status, items, usage)

    def _record(
        self, status: str, output: list[dict[str, Any]], usage: Usage | None
    ) -> dict[str, Any]:
        body = self._body
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        several = body.parallel_tool_calls is not False
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "error": None,
            "incomplete_details": why,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model.name,
            "output": output,
            "parallel_tool_calls": several,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}, **(body.text or {})},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else self._usage(usage, output),
            "user": body.user,
        }

    def _usage(self, usage: Usage, output: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Numbers of tokens. Reasoning tokens are counted from its text, without the marks."""
        texts = [item["content"][0]["text"] for item in output if item["type"] == "reasoning"]
        encode = self._model.llm.tokenizer.encode
        num_reasoning = sum(len(encode(text, add_special_tokens=False)) for text in texts)
        return {
            "input_tokens": usage.num_prompt,
            "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": 0},
            "output_tokens": usage.num_new,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": usage.num_prompt + usage.num_new,
        }


def answer_message(blocks: Sequence[Block]) -> MessageRecord:
    """The message that an answer is for the turns after it."""
    content = "".join(block.text for block in blocks if block.kind == "text")
    message: MessageRecord = {"role": "assistant", "content": content}
    calls = [
        {
            "id": block.call_id,
            "type": "function",
            "function": {"name": block.name, "arguments": json_object(block.text)},
        }
        for block in blocks
        if block.kind == "call"
    ]
    return {**message, "tool_calls": calls} if calls else message


def json_object(text: str) -> str:
    """The arguments of a call; "{}" for those that were cut off."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return "{}"
    return text
