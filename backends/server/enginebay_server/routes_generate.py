"""Routes of OpenAI's API that generate text or embeddings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from enginebay.outputs import RequestOutput
from enginebay.types import SamplingParams
from enginebay_server.bodies import check_stream, check_unknown
from enginebay_server.chat import ChatAnswer, ChatBody, ChatStream, chat_jobs, chat_params
from enginebay_server.completions import (
    CompletionAnswer,
    CompletionBody,
    CompletionStream,
    check_text_lengths,
    completion_jobs,
    completion_params,
)
from enginebay_server.embeddings import EmbeddingBody, embed
from enginebay_server.errors import to_json
from enginebay_server.running import begin, in_time, streamed, whole_outputs
from enginebay_server.served import ServedModel
from enginebay_server.state import AppState
from enginebay_server.tools import ToolUse


def generate_routes(state: AppState) -> APIRouter:
    """/v1/chat/completions, /v1/completions and /v1/embeddings."""
    router = APIRouter()
    settings = state.settings

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await answer_chat(state, body, request)

    @router.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await answer_completion(state, body, request)

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        headers = await state.lanes.read(request.scope, lambda: check_unknown(body, settings))
        model = state.models.ready(body.model, settings.retry_after_s)
        record = await in_time(state, request, embed(model, body, state, request))
        return as_json(record, headers)

    return router


async def answer_chat(state: AppState, body: ChatBody, request: Request) -> Response:
    """Answer a chat, whole or as a stream."""
    settings = state.settings

    def read() -> tuple[dict[str, str], ServedModel, ToolUse, SamplingParams]:
        headers = check_unknown(body, settings, body.ignored_parts)
        check_stream(body)
        model = state.models.ready(body.model, settings.retry_after_s)
        use = body.tool_use
        return headers, model, use, chat_params(model, body, settings, use)

    headers, model, use, params = await state.lanes.read(request.scope, read)
    has_form = body.has_form or use.schema is not None
    generation = begin(state, request, model, "chatcmpl-", has_form=has_form)
    make = functools.partial(chat_jobs, model, body, params, use)
    if body.stream:
        stream = functools.partial(ChatStream, generation, body, params, use)
        return await streamed(state, request, generation, make, stream, headers)
    outputs = await whole_outputs(state, request, generation, make)
    answer = ChatAnswer(generation, body, params, use)
    return await written(state, outputs, lambda: answer.record(outputs[0]), headers)


async def answer_completion(state: AppState, body: CompletionBody, request: Request) -> Response:
    """Answer prompts, whole or as a stream."""
    settings = state.settings

    def read() -> tuple[dict[str, str], ServedModel, SamplingParams]:
        headers = check_unknown(body, settings)
        check_stream(body)
        model = state.models.ready(body.model, settings.retry_after_s)
        check_text_lengths(body.prompts, model, "prompt")
        return headers, model, completion_params(body, settings)

    headers, model, params = await state.lanes.read(request.scope, read)
    generation = begin(state, request, model, "cmpl-", has_form=body.has_form)
    make = functools.partial(completion_jobs, body, params)
    if body.stream:
        stream = functools.partial(CompletionStream, generation, body, params)
        return await streamed(state, request, generation, make, stream, headers)
    outputs = await whole_outputs(state, request, generation, make)
    answer = CompletionAnswer(generation, body, params)
    return await written(state, outputs, lambda: answer.record(outputs), headers)


async def written(
    state: AppState,
    outputs: Sequence[RequestOutput],
    make: Callable[[], dict[str, Any]],
    headers: dict[str, str],
) -> Response:
    """Return the answer that `make` records. Long outputs are written on another thread."""
    size = sum(map(num_output_values, outputs))
    return await state.lanes.write(size, lambda: as_json(make(), headers))


def num_output_values(output: RequestOutput) -> int:
    """Return how many token ids and log-probabilities an output has."""
    lists = [output.prompt_logprobs, *(one.logprobs for one in output.outputs)]
    found = sum(len(best or ()) for logprobs in lists if logprobs for best in logprobs)
    return found + len(output.prompt_token_ids) + sum(len(o.token_ids) for o in output.outputs)


def as_json(record: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    """An answer in JSON."""
    return Response(to_json(record), headers=headers, media_type="application/json")
