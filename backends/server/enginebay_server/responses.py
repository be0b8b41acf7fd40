"""/v1/responses: the body, which becomes a chat, and the record of an answer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from enginebay.errors import shown
from enginebay_server.api_fields import RESPONSE_FIELDS
from enginebay_server.blocks import Block
from enginebay_server.bodies import Body
from enginebay_server.chat import ChatBody
from enginebay_server.errors import ApiError
from enginebay_server.field_limits import AtMost, Name, Object, Objects, Tools
from enginebay_server.messages_in import with_one_system
from enginebay_server.response_items import MessageRecord, ignored_items, kind_of
from enginebay_server.response_tools import call_names, chat_choice, chat_tools, ignored_tools
from enginebay_server.sampling_fields import sampling_field
from enginebay_server.served import ServedModel
from enginebay_server.tools import INPUT
from enginebay_server.usage import Usage

MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
"""OpenAI's limits on the metadata of a response."""

ResponseMetadata = Annotated[
    dict[
        Annotated[str, AtMost(MAX_KEY_CHARS, is_list=False)],
        Annotated[str, AtMost(MAX_VALUE_CHARS, is_list=False)],
    ],
    AtMost(MAX_METADATA, is_list=False),
]

LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that asks for the log-probabilities of a text."""

MAX_TOP_LOGPROBS = 20
"""OpenAI's limit."""

KNOWN_INCLUDES = frozenset(
    {
        LOGPROBS,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
"""Values of `include`. All but LOGPROBS ask for parts of items which no answer here has: nothing is
encrypted, and no tool of an API runs.
"""


class ResponseStreamOptions(BaseModel):
    """Options of a stream. No event has padding, so there is nothing to switch off."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_obfuscation: bool | None = None


class ResponsesBody(Body):
    """The body of a POST to /v1/responses: one turn of a conversation."""

    api_fields = RESPONSE_FIELDS

    model: Name | None = None
    input: str | Objects | None = None
    instructions: str | None = None
    previous_response_id: Name | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = sampling_field("temperature")
    top_p: float | None = sampling_field("top_p")
    presence_penalty: float | None = sampling_field("presence_penalty")
    frequency_penalty: float | None = sampling_field("frequency_penalty")
    stream: bool | None = None
    store: bool | None = None
    tools: Tools | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: ResponseMetadata | None = None
    user: Name | None = None
    max_tool_calls: int | None = Field(default=None, ge=1)
    """The max calls of tools that the server runs. It runs none, so the limit always holds."""
    include: Annotated[list[Name], AtMost(64)] | None = None
    stream_options: ResponseStreamOptions | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        """Number of top tokens to return with each token; None for no log-probabilities."""
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    @property
    def ignored_parts(self) -> list[str]:
        """The names of parts that change no answer, for the header of ignored fields."""
        given = {
            "stream_options": (self.stream_options or ResponseStreamOptions()).model_extra or {},
            "text": {k: v for k, v in (self.text or {}).items() if k != "format"},
            "reasoning": {k: v for k, v in (self.reasoning or {}).items() if k != "effort"},
        }
        parts = [
            f"{field}.{name}"
            for field, values in given.items()
            for name, value in values.items()
            if value is not None
        ]
        parts += ["include"] if set(self.include or ()) - KNOWN_INCLUDES else []
        parts += ["top_logprobs"] if self.top_logprobs and self.num_logprobs is None else []
        return [*parts, *ignored_tools(self.tools), *ignored_items(self.items)]

    @property
    def reads_store(self) -> bool:
        """Whether the conversation has parts that are stored."""
        is_continued = self.previous_response_id is not None
        return is_continued or any(kind_of(item) == "item_reference" for item in self.items)

    @property
    def items(self) -> list[dict[str, Any]]:
        """The input as a list of items."""
        if self.input is None:
            return []
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
        return ChatBody(
            model=self.model,
            messages=with_one_system(messages, [self.instructions or ""]),
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stream=self.stream,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            tools=chat_tools(self.tools),
            tool_choice=chat_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_format(self.text),
            reasoning_effort=_effort(self.reasoning),
            user=self.user,
            logprobs=self.num_logprobs is not None,
            top_logprobs=self.num_logprobs,
        )


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


PREFIXES = {"text": "msg", "call": "fc", "custom": "ctc", "reasoning": "rs"}


class ResponseRecords:
    """The JSON records of one response: at its beginning, of its items, and at its end."""

    def __init__(self, response_id: str, model: ServedModel, body: ResponsesBody) -> None:
        self.id = response_id
        self._model = model
        self._body = body
        self._created_s = int(time.time())
        self._names = call_names(body.tools)

    def is_custom(self, block: Block) -> bool:
        """Return whether a block is a call of a custom tool, whose text is no JSON."""
        return block.kind == "call" and block.name in self._names.custom

    def item_id(self, block: Block) -> str:
        """The id of the output item that a block (text, reasoning or a call) becomes."""
        prefix = PREFIXES["custom" if self.is_custom(block) else block.kind]
        return f"{prefix}_{self.id.removeprefix('resp_')}{block.index}"

    def part(self, block: Block) -> dict[str, Any]:
        """The content part of a block of text or reasoning."""
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        return {
            "type": "output_text",
            "text": block.text,
            "annotations": [],
            "logprobs": block.logprobs,
        }

    def item(self, block: Block, status: str = "completed") -> dict[str, Any]:
        """A block as an output item. An item in progress has no content yet."""
        head = {"id": self.item_id(block), "status": status}
        is_new = status == "in_progress"
        if block.kind == "call":
            text = "" if is_new else block.text
            call = {**head, "call_id": block.call_id, **self._names.fields(block.name)}
            if self.is_custom(block):
                return {**call, "type": "custom_tool_call", "input": text}
            return {**call, "type": "function_call", "arguments": text}
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

    def failed(self, blocks: Sequence[Block], error: ApiError, usage: Usage) -> dict[str, Any]:
        """The response after an error, with the items so far, of which the last is incomplete."""
        items = [self.item(block) for block in blocks]
        if items:
            items[-1]["status"] = "incomplete"
        what = {"code": error.code or error.type, "message": error.message}
        return {**self._record("failed", items, usage), "error": what}

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
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": why,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self._model.name,
            "output": output,
            "parallel_tool_calls": several,
            "presence_penalty": body.presence_penalty or 0.0,
            "frequency_penalty": body.frequency_penalty or 0.0,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": None,
            "safety_identifier": None,
            "service_tier": "default",
            "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}, **(body.text or {})},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
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


def answer_message(blocks: Sequence[Block], is_custom: Callable[[Block], bool]) -> MessageRecord:
    """The message that an answer is for the turns after it."""
    content = "".join(block.text for block in blocks if block.kind == "text")
    message: MessageRecord = {"role": "assistant", "content": content}
    calls = []
    for block in blocks:
        if block.kind == "call":
            text = json.dumps({INPUT: block.text}) if is_custom(block) else json_object(block.text)
            function = {"name": block.name, "arguments": text}
            calls.append({"id": block.call_id, "type": "function", "function": function})
    return {**message, "tool_calls": calls} if calls else message


def json_object(text: str) -> str:
    """The arguments of a call; "{}" for those that were cut off."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return "{}"
    return text
