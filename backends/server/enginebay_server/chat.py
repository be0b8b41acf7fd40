"""/v1/chat/completions: its body, its answer and its stream."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from pydantic import Field

from enginebay.outputs import CompletionOutput, RequestOutput, StreamChunk
from enginebay.types import SamplingParams
from enginebay_server.api_fields import CHAT_FIELDS
from enginebay_server.bodies import GenerationBody, sampling_params
from enginebay_server.errors import ApiError
from enginebay_server.field_limits import Name, Object, Objects, Tools
from enginebay_server.frames import Frames
from enginebay_server.generation import Generation, PromptJob
from enginebay_server.logprobs import chat_logprobs
from enginebay_server.messages_in import as_messages
from enginebay_server.parsing.message import MessageParser
from enginebay_server.replies import DeltaRecords, finish_reason, message_record, whole_reply
from enginebay_server.served import ServedModel
from enginebay_server.settings import ServerSettings
from enginebay_server.sse import DONE, StreamWriter
from enginebay_server.stopped import stop_reason
from enginebay_server.tool_prompt import with_described_tools
from enginebay_server.tools import ToolUse, left_out, tool_use
from enginebay_server.usage import Usage

NO_TOOLS = ToolUse()


class ChatBody(GenerationBody):
    """A conversation to answer."""

    api_fields = CHAT_FIELDS

    messages: Objects = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """The newer name of max_tokens. It overrides max_tokens when both are set."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Name | None = None
    """A variable for chat templates that use it."""

    @property
    def tool_use(self) -> ToolUse:
        """The tools that the answer may call. Raises ApiError for a malformed tool."""
        several = self.parallel_tool_calls is not False
        use = tool_use(self.tools, self.tool_choice, several=several)
        return dataclasses.replace(use, is_guided=self.has_form)

    @property
    def ignored_parts(self) -> list[str]:
        """The names of tools that the server cannot run, for the header of ignored fields."""
        return left_out(self.tools)

    @property
    def num_logprobs(self) -> int | None:
        """Number of top tokens to return with each new token; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


def chat_params(
    model: ServedModel, body: ChatBody, settings: ServerSettings, use: ToolUse
) -> SamplingParams:
    """Return the SamplingParams of a chat, with the constraint of a tool call that it demands."""
    if body.top_logprobs and not body.logprobs:
        raise ApiError(
            400,
            f"top_logprobs = {body.top_logprobs} is set without logprobs. Allowed: both. "
            "Pass logprobs = true.",
            param="top_logprobs",
        )
    use.check(model)
    max_tokens = body.max_completion_tokens or body.max_tokens
    params = sampling_params(body, settings, max_tokens=max_tokens, logprobs=body.num_logprobs)
    if use.schema is not None:
        if body.has_form:
            raise ApiError(
                400,
                "tool_choice demands a call, and another field sets the output format. Allowed: "
                "one of the two. Leave one out.",
                param="tool_choice",
            )
        params = params.model_copy(update={"json_schema": use.schema})
    if use.keeps_special_tokens(model):
        params = params.model_copy(update={"skip_special_tokens": False})
    return params


def render_chat(model: ServedModel, body: ChatBody, use: ToolUse = NO_TOOLS) -> list[int]:
    """Render a conversation with the model's chat template, and return its token ids."""
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    options: dict[str, Any] = {
        "chat_template": model.chat_template,
        "chat_template_kwargs": variables or None,
        "tools": list(use.described) or None,
        "max_prompt_tokens": model.max_prompt_tokens,
    }
    if body.continue_final_message:
        options |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    messages = as_messages(body.messages)
    if model.formats.describes_tools:
        takes_system = "system" in model.formats.chat.chat_template
        messages = with_described_tools(messages, use, takes_system=takes_system)
        options["tools"] = None
    num_chars = sum(len(message["content"]) for message in messages)
    if num_chars > model.max_text_chars:
        raise ApiError(
            400,
            f"messages of {num_chars} characters. Allowed: at most {model.max_text_chars}, because "
            "of the model's context. The prompt is too long.",
            param="messages",
            code="context_length_exceeded",
        )
    return model.llm.tokenizer.apply_chat_template(messages, **options)


def chat_jobs(
    model: ServedModel, body: ChatBody, params: SamplingParams, use: ToolUse
) -> Sequence[PromptJob]:
    """Return the job of a chat: its prompt and SamplingParams."""
    return [PromptJob(render_chat(model, body, use), params, body.turn)]


class ChatAnswer:
    """Builds the answer of a chat that is not streamed."""

    def __init__(
        self, generation: Generation, body: ChatBody, params: SamplingParams, use: ToolUse
    ) -> None:
        self._generation = generation
        self._body = body
        self._params = params
        self._use = use

    def record(self, output: RequestOutput) -> dict[str, Any]:
        """Return the body of the answer."""
        usage = Usage(since_s=self._generation.usage_since_s)
        usage.add_output(output)
        return {
            "id": self._generation.id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self._generation.model.name,
            "choices": [self._choice(one) for one in output.outputs],
            "usage": usage.record,
        }

    def _choice(self, one: CompletionOutput) -> dict[str, Any]:
        model = self._generation.model
        told = None
        if one.logprobs is not None:
            num_best = self._body.num_logprobs or 0
            content = chat_logprobs(
                one.token_ids,
                one.logprobs,
                num_best,
                model.words,
                begins_text=not self._body.continue_final_message,
            )
            told = {"content": content, "refusal": None}
        parser = self._use.parser(model, self._generation.handles[0].prompt_token_ids)
        reply = whole_reply(one.text, parser)
        stopped_by = stop_reason(model, self._params, one.token_ids, one.finish_reason)
        is_cut = self._use.is_cut(stopped_by)
        return {
            "index": one.index,
            "message": message_record(reply, self._use.custom),
            "logprobs": told,
            "finish_reason": finish_reason(one.finish_reason, len(reply.calls), is_cut=is_cut),
            "stop_reason": stopped_by,
        }


class ChatStream(StreamWriter):
    """Writes the events of a chat's stream."""

    def __init__(
        self, generation: Generation, body: ChatBody, params: SamplingParams, use: ToolUse
    ) -> None:
        self._model = generation.model
        self._body = body
        self._params = params
        self._usage = Usage(generation.num_prompt_tokens, since_s=generation.usage_since_s)
        head = {
            "id": generation.id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": self._model.name,
        }
        self._frames = Frames(head, body.stream_options, self._usage)
        count = generation.handles[0].num_completions
        self._prefixes = [
            self._frames.text_prefix(index, b'"delta":{"content":') for index in range(count)
        ]
        self._token_ids: list[list[int]] = [[] for _ in range(count)]
        prompt_ids = generation.handles[0].prompt_token_ids
        self._use = use
        self._begins_text = [not body.continue_final_message] * count
        """By completion, whether the next token is the first of its text."""
        self._parsers = [use.parser(self._model, prompt_ids) for _ in range(count)]
        self._records = [DeltaRecords(use.custom) for _ in range(count)]

    def begin(self) -> bytes:
        delta: Mapping[str, Any] = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._event(index, delta) for index in range(len(self._prefixes)))

    def write(self, place: int, chunk: StreamChunk) -> bytes:
        self._usage.add(chunk)
        if self._params.stop or self._params.stop_token_ids:
            self._token_ids[chunk.index] += chunk.delta_token_ids
        parser = self._parsers[chunk.index]
        if parser is not None:
            found = self._parsed(parser, chunk)
        elif chunk.logprobs:
            found = self._event(chunk.index, {"content": chunk.delta_text}, chunk)
        elif chunk.delta_text:
            found = self._frames.text(self._prefixes[chunk.index], chunk.delta_text, b"}")
        else:
            found = b""
        if chunk.finish_reason is not None:
            found += self._last(chunk, 0 if parser is None else parser.num_calls)
        return found

    def _parsed(self, parser: MessageParser, chunk: StreamChunk) -> bytes:
        """Write an event for each delta of a chunk. The first event has the log-probabilities."""
        deltas = parser.feed(chunk.delta_text)
        if chunk.finish_reason is not None:
            deltas += parser.finish()
        records = list(map(self._records[chunk.index].record, deltas))
        if chunk.logprobs and not records:
            records = [{}]
        return b"".join(
            self._event(chunk.index, record, None if place else chunk)
            for place, record in enumerate(records)
        )

    def _last(self, chunk: StreamChunk, num_calls: int) -> bytes:
        if chunk.finish_reason in ("abort", "error"):
            raise ApiError(503, "the server ended the request", code="request_aborted")
        token_ids = self._token_ids[chunk.index]
        stopped_by = stop_reason(self._model, self._params, token_ids, chunk.finish_reason)
        is_cut = self._use.is_cut(stopped_by)
        return self._frames.choice(
            {
                "index": chunk.index,
                "delta": {},
                "logprobs": None,
                "finish_reason": finish_reason(chunk.finish_reason, num_calls, is_cut=is_cut),
                "stop_reason": stopped_by,
            }
        )

    async def end(self) -> bytes:
        return self._frames.last() + DONE

    def fail(self, error: ApiError) -> bytes:
        return b"data: " + orjson.dumps(error.body) + b"\n\n"

    def _event(
        self, index: int, delta: Mapping[str, Any], chunk: StreamChunk | None = None
    ) -> bytes:
        told = None
        if chunk is not None and chunk.logprobs:
            content = chat_logprobs(
                chunk.delta_token_ids,
                chunk.logprobs,
                self._body.num_logprobs or 0,
                self._model.words,
                begins_text=self._begins_text[index],
            )
            self._begins_text[index] = False
            told = {"content": content, "refusal": None}
        return self._frames.choice(
            {"index": index, "delta": delta, "logprobs": told, "finish_reason": None}
        )
