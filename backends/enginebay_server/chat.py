"""/v1/chat/completions: the body, the whole answer and the stream."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from pydantic import Field

from enginebay.outputs import CompletionOutput, RequestOutput, StreamChunk
from enginebay.types import SamplingParams
from enginebay_server.bodies import GenerationBody, sampling_params
from enginebay_server.errors import ApiError
from enginebay_server.frames import Frames
from enginebay_server.generation import Generation, PromptJob
from enginebay_server.logprobs import chat_logprobs
from enginebay_server.messages_in import as_messages
from enginebay_server.served import ServedModel
from enginebay_server.settings import ServerSettings
from enginebay_server.sse import DONE, StreamWriter
from enginebay_server.stopped import stop_reason
from enginebay_server.usage import Usage


class ChatBody(GenerationBody):
    """A conversation to answer."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """The newer name of max_tokens, which wins."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Best tokens to return with each new one; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


def chat_params(body: ChatBody, settings: ServerSettings) -> SamplingParams:
    """How the tokens of a chat are chosen."""
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(
            400,
            f"top_logprobs = {body.top_logprobs} without logprobs. Allowed: both. "
            "Pass logprobs = true.",
            param="top_logprobs",
        )
    max_tokens = body.max_completion_tokens or body.max_tokens
    return sampling_params(body, settings, max_tokens=max_tokens, logprobs=body.num_logprobs)


def render_chat(model: ServedModel, body: ChatBody) -> list[int]:
    """The token ids of a conversation, by the model's chat template."""
    options: dict[str, Any] = {
        "chat_template": model.chat_template,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    if body.continue_final_message:
        options |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    return model.llm.tokenizer.apply_chat_template(as_messages(body.messages), **options)


def chat_jobs(model: ServedModel, body: ChatBody, params: SamplingParams) -> Sequence[PromptJob]:
    """The one job of a chat."""
    return [PromptJob(render_chat(model, body), params, body.turn)]


class ChatAnswer:
    """The whole answer of a chat."""

    def __init__(self, generation: Generation, body: ChatBody, params: SamplingParams) -> None:
        self._generation = generation
        self._body = body
        self._params = params

    def record(self, output: RequestOutput) -> dict[str, Any]:
        """The body of the answer."""
        usage = Usage()
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
            content = chat_logprobs(one.token_ids, one.logprobs, num_best, model.token_text)
            told = {"content": content, "refusal": None}
        return {
            "index": one.index,
            "message": {"role": "assistant", "content": one.text, "refusal": None},
            "logprobs": told,
            "finish_reason": one.finish_reason,
            "stop_reason": stop_reason(model, self._params, one.token_ids, one.finish_reason),
        }


class ChatStream(StreamWriter):
    """The events of a chat's stream."""

    def __init__(self, generation: Generation, body: ChatBody, params: SamplingParams) -> None:
        self._model = generation.model
        self._body = body
        self._params = params
        self._usage = Usage(generation.num_prompt_tokens)
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

    def begin(self) -> bytes:
        delta: Mapping[str, Any] = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._event(index, delta) for index in range(len(self._prefixes)))

    def write(self, place: int, chunk: StreamChunk) -> bytes:
        self._usage.add(chunk)
        if self._params.stop or self._params.stop_token_ids:
            self._token_ids[chunk.index] += chunk.delta_token_ids
        found = b""
        if chunk.logprobs is not None and chunk.delta_token_ids:
            found = self._event(chunk.index, {"content": chunk.delta_text}, chunk)
        elif chunk.delta_text:
            found = self._frames.text(self._prefixes[chunk.index], chunk.delta_text, b"}")
        if chunk.finish_reason is not None:
            found += self._last(chunk)
        return found

    def _last(self, chunk: StreamChunk) -> bytes:
        if chunk.finish_reason in ("abort", "error"):
            raise ApiError(503, "the server ended the request", code="request_aborted")
        token_ids = self._token_ids[chunk.index]
        return self._frames.choice(
            {
                "index": chunk.index,
                "delta": {},
                "logprobs": None,
                "finish_reason": chunk.finish_reason,
                "stop_reason": stop_reason(
                    self._model, self._params, token_ids, chunk.finish_reason
                ),
            }
        )

    def end(self) -> bytes:
        return self._frames.last() + DONE

    def fail(self, error: ApiError) -> bytes:
        return b"data: " + orjson.dumps(error.body) + b"\n\n"

    def _event(
        self, index: int, delta: Mapping[str, Any], chunk: StreamChunk | None = None
    ) -> bytes:
        told = None
        if chunk is not None and chunk.logprobs is not None:
            content = chat_logprobs(
                chunk.delta_token_ids,
                chunk.logprobs,
                self._body.num_logprobs or 0,
                self._model.token_text,
            )
            told = {"content": content, "refusal": None}
        return self._frames.choice(
            {"index": index, "delta": delta, "logprobs": told, "finish_reason": None}
        )
