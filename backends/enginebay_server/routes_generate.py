"""Routes that generate text or embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from enginebay_server.bodies import check_stream, check_unknown
from enginebay_server.chat import ChatAnswer, ChatBody, ChatStream, chat_jobs, chat_params
from enginebay_server.completions import (
    CompletionAnswer,
    CompletionBody,
    CompletionStream,
    completion_jobs,
    completion_params,
)
from enginebay_server.embeddings import EmbeddingBody, embed
from enginebay_server.errors import ApiError
from enginebay_server.generation import Generation, until_gone
from enginebay_server.sse import EventStream
from enginebay_server.state import AppState

Result = TypeVar("Result")


def generate_routes(state: AppState) -> APIRouter:
    """/v1/chat/completions, /v1/completions and /v1/embeddings."""
    router = APIRouter()
    settings = state.settings

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        headers = check_unknown(body, settings)
        check_stream(body)
        model = state.models.ready(body.model, settings.retry_after_s)
        use = body.tool_use
        params = chat_params(model, body, settings, use)
        generation = Generation(state.metrics.of[model.name], state.limit, "chatcmpl-")
        try:
            start = generation.start(
                lambda: chat_jobs(model, body, params, use), stream=bool(body.stream)
            )
            await in_time(state, request, start)
            if body.stream:
                writer = ChatStream(generation, body, params, use)
                return EventStream(generation, writer, settings.request_timeout_s, headers)
            [output] = await in_time(state, request, generation.outputs())
            record = ChatAnswer(generation, body, params, use).record(output)
        except BaseException:
            generation.close()
            raise
        generation.close()
        return as_json(record, headers)

    @router.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        headers = check_unknown(body, settings)
        check_stream(body)
        model = state.models.ready(body.model, settings.retry_after_s)
        params = completion_params(body, settings)
        generation = Generation(state.metrics.of[model.name], state.limit, "cmpl-")
        try:
            start = generation.start(
                lambda: completion_jobs(body, params), stream=bool(body.stream)
            )
            await in_time(state, request, start)
            if body.stream:
                writer = CompletionStream(generation, body, params)
                return EventStream(generation, writer, settings.request_timeout_s, headers)
            outputs = await in_time(state, request, generation.outputs())
            record = CompletionAnswer(generation, body, params).record(outputs)
        except BaseException:
            generation.close()
            raise
        generation.close()
        return as_json(record, headers)

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        headers = check_unknown(body, settings)
        model = state.models.ready(body.model, settings.retry_after_s)
        record = await in_time(state, request, embed(model, body, state))
        return as_json(record, headers)

    return router


async def in_time(state: AppState, request: Request, work: Awaitable[Result]) -> Result:
    """What `work` returns while its client waits. ApiError 504 after the request timeout."""
    limit_s = state.settings.request_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            return await until_gone(request.receive, work)
    except TimeoutError:
        raise ApiError(504, f"the request took more than {limit_s:g} s") from None


def as_json(record: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    """An answer in JSON."""
    return Response(orjson.dumps(record), headers=headers, media_type="application/json")
