"""Routes of Anthropic's API."""

from __future__ import annotations

import functools
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from enginebay.types import SamplingParams
from enginebay_server.anthropic import (
    CountBody,
    MessagesBody,
    MessageStream,
    message_answer,
)
from enginebay_server.bodies import check_unknown
from enginebay_server.chat import ChatBody, chat_jobs, chat_params, render_chat
from enginebay_server.routes_generate import as_json, written
from enginebay_server.running import begin, streamed, whole_outputs
from enginebay_server.served import ServedModel
from enginebay_server.state import AppState
from enginebay_server.tools import ToolUse


def anthropic_routes(state: AppState) -> APIRouter:
    """/v1/messages and /v1/messages/count_tokens."""
    router = APIRouter()
    settings = state.settings

    @router.post("/v1/messages")
    async def messages(body: MessagesBody, request: Request) -> Response:
        def read() -> tuple[dict[str, str], ServedModel, ChatBody, ToolUse, SamplingParams]:
            headers = check_unknown(body, settings, body.ignored_parts)
            model = state.models.ready(body.model, settings.retry_after_s)
            chat = body.chat
            use = chat.tool_use
            return headers, model, chat, use, chat_params(model, chat, settings, use)

        headers, model, chat, use, params = await state.lanes.read(request.scope, read)
        generation = begin(state, request, model, "msg_", has_form=use.schema is not None)
        make = functools.partial(chat_jobs, model, chat, params, use)
        if body.stream:
            stream = functools.partial(MessageStream, generation, params, use)
            return await streamed(state, request, generation, make, stream, headers)
        outputs = await whole_outputs(state, request, generation, make)

        def record() -> dict[str, Any]:
            return message_answer(generation, params, use, outputs[0])

        return await written(state, outputs, record, headers)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountBody, request: Request) -> Response:
        def count() -> Response:
            headers = check_unknown(body, settings, body.ignored_parts)
            model = state.models.find(body.model)
            chat = body.as_chat()
            token_ids = render_chat(model, chat, chat.tool_use)
            return as_json({"input_tokens": len(token_ids)}, headers)

        return await state.lanes.of(request.scope).run(count)

    return router
