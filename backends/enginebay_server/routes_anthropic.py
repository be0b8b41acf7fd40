"""Routes of Anthropic's API."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from enginebay.llm.reading import in_thread
from enginebay_server.anthropic import (
    CountBody,
    MessagesBody,
    MessageStream,
    message_answer,
)
from enginebay_server.bodies import check_unknown
from enginebay_server.chat import chat_jobs, chat_params, render_chat
from enginebay_server.routes_generate import as_json
from enginebay_server.running import begin, streamed, whole_outputs
from enginebay_server.state import AppState


def anthropic_routes(state: AppState) -> APIRouter:
    """/v1/messages and /v1/messages/count_tokens."""
    router = APIRouter()
    settings = state.settings

    @router.post("/v1/messages")
    async def messages(body: MessagesBody, request: Request) -> Response:
        headers = check_unknown(body, settings)
        model = state.models.ready(body.model, settings.retry_after_s)
        chat = body.chat
        use = chat.tool_use
        params = chat_params(model, chat, settings, use)
        generation = begin(state, request, model, "msg_")

        def make() -> Any:
            return chat_jobs(model, chat, params, use)

        if body.stream:
            return await streamed(
                state,
                request,
                generation,
                make,
                lambda: MessageStream(generation, params, use),
                headers,
            )
        [output] = await whole_outputs(state, request, generation, make)
        return as_json(message_answer(generation, params, use, output), headers)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountBody) -> Response:
        headers = check_unknown(body, settings)
        model = state.models.find(body.model)
        chat = body.as_chat()
        token_ids = await in_thread(render_chat, model, chat, chat.tool_use)
        return as_json({"input_tokens": len(token_ids)}, headers)

    return router
