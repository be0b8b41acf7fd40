"""Routes of OpenAI's API that generate text or embeddings."""

from __future__ import annotations

from typing import Any

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
from enginebay_server.errors import to_json
from enginebay_server.running import begin, in_time, streamed, whole_outputs
from enginebay_server.state import AppState


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
        generation = begin(state, request, model, "chatcmpl-")

        def make() -> Any:
            return chat_jobs(model, body, params, use)

        if body.stream:
            return await streamed(
                state,
                request,
                generation,
                make,
                lambda: ChatStream(generation, body, params, use),
                headers,
            )
        [output] = await whole_outputs(state, request, generation, make)
        return as_json(ChatAnswer(generation, body, params, use).record(output), headers)

    @router.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        headers = check_unknown(body, settings)
        check_stream(body)
        model = state.models.ready(body.model, settings.retry_after_s)
        params = completion_params(body, settings)
        generation = begin(state, request, model, "cmpl-")

        def make() -> Any:
            return completion_jobs(body, params)

        if body.stream:
            return await streamed(
                state,
                request,
                generation,
                make,
                lambda: CompletionStream(generation, body, params),
                headers,
            )
        outputs = await whole_outputs(state, request, generation, make)
        return as_json(CompletionAnswer(generation, body, params).record(outputs), headers)

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        headers = check_unknown(body, settings)
        model = state.models.ready(body.model, settings.retry_after_s)
        record = await in_time(state, request, embed(model, body, state, request))
        return as_json(record, headers)

    return router


def as_json(record: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    """An answer in JSON."""
    return Response(to_json(record), headers=headers, media_type="application/json")
