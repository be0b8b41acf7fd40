"""Routes of the Responses API: stored responses, which clients can continue, read and delete."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import Response

from enginebay.types import SamplingParams
from enginebay_server.blocks import Block
from enginebay_server.bodies import check_unknown
from enginebay_server.chat import ChatBody, chat_jobs, chat_params
from enginebay_server.errors import ApiError
from enginebay_server.response_items import input_messages, resolved
from enginebay_server.response_store import StoredResponse, store
from enginebay_server.response_stream import ResponseStream
from enginebay_server.response_text import OutputTextReader
from enginebay_server.responses import (
    ResponseRecords,
    ResponsesBody,
    answer_message,
)
from enginebay_server.routes_generate import as_json, num_output_values
from enginebay_server.running import begin, streamed, whole_outputs
from enginebay_server.served import ServedModel
from enginebay_server.state import AppState
from enginebay_server.tools import ToolUse
from enginebay_server.usage import Usage


def response_routes(state: AppState) -> APIRouter:
    """/v1/responses: make, get and delete one, and list the items of its input."""
    router = APIRouter()

    @router.post("/v1/responses")
    async def responses(body: ResponsesBody, request: Request) -> Response:
        return await respond(state, body, request)

    @router.get("/v1/responses/{response_id}")
    async def response(response_id: str) -> Response:
        return await state.lanes.files.run(lambda: as_json(found(state, response_id).record))

    @router.delete("/v1/responses/{response_id}")
    async def forget(response_id: str) -> Response:
        if not await state.lanes.files.run(state.responses.delete, response_id):
            raise not_found(response_id)
        return as_json({"id": response_id, "object": "response", "deleted": True})

    @router.get("/v1/responses/{response_id}/input_items")
    async def input_items(response_id: str) -> Response:
        def listed() -> Response:
            items = [
                {"id": f"item_{place}", **item}
                for place, item in enumerate(found(state, response_id).input_items)
            ]
            ends = (items[0]["id"], items[-1]["id"]) if items else (None, None)
            record = {"object": "list", "data": items, "has_more": False}
            return as_json({**record, "first_id": ends[0], "last_id": ends[1]})

        return await state.lanes.files.run(listed)

    return router


class ReadResponse(NamedTuple):
    """A body that was read: headers of the answer, and the chat that answers it."""

    headers: dict[str, str]
    model: ServedModel
    messages: list[dict[str, Any]]
    chat: ChatBody
    use: ToolUse
    params: SamplingParams


async def respond(state: AppState, body: ResponsesBody, request: Request) -> Response:
    """Answer a body, whole or as a stream, and keep the answer unless `store` is false."""
    settings = state.settings

    def read() -> ReadResponse:
        headers = check_unknown(body, settings, body.ignored_parts)
        model = state.models.ready(body.model, settings.retry_after_s)
        items = resolved(body.items, functools.partial(stored_output, state))
        messages = [*former_messages(state, body), *input_messages(items)]
        chat = body.as_chat(messages)
        use = chat.tool_use
        return ReadResponse(
            headers, model, messages, chat, use, chat_params(model, chat, settings, use)
        )

    if not body.reads_store:
        taken = await state.lanes.read(request.scope, read)
    else:  # the conversation so far is read from the store
        taken = await state.lanes.of(request.scope).run(read)
    headers, model, messages, chat, use, params = taken
    has_form = chat.has_form or use.schema is not None
    generation = begin(state, request, model, "resp_", has_form=has_form)
    records = ResponseRecords(generation.id, model, body)

    make = functools.partial(chat_jobs, model, chat, params, use)

    async def keep(blocks: list[Block], record: dict[str, Any]) -> None:
        if body.store is not False:
            conversation = [*messages, answer_message(blocks, records.is_custom)]
            stored = StoredResponse(record, body.items, conversation)
            await state.lanes.files.run(store, state.responses, generation.id, stored)

    def reader(prompt_token_ids: Sequence[int]) -> OutputTextReader:
        return OutputTextReader(
            use.parser(model, prompt_token_ids),
            model.words,
            body.num_logprobs,
            skips_special=params.skip_special_tokens,
        )

    if body.stream:

        def stream() -> ResponseStream:
            own = reader(generation.handles[0].prompt_token_ids)
            return ResponseStream(generation, records, own, keep)

        return await streamed(state, request, generation, make, stream, headers)
    [output] = await whole_outputs(state, request, generation, make)
    [one] = output.outputs
    usage = Usage()
    usage.add_output(output)
    own = reader(output.prompt_token_ids)

    def answer() -> tuple[dict[str, Any], Response]:
        own.read(one.text, one.token_ids, one.logprobs, is_last=True)
        record = records.ended(own.blocks.all, one.finish_reason, usage)
        return record, as_json(record, headers)

    record, answered = await state.lanes.write(num_output_values(output), answer)
    await keep(own.blocks.all, record)
    return answered


def former_messages(state: AppState, body: ResponsesBody) -> list[dict[str, Any]]:
    """The conversation that a body goes on with. ApiError 404 when it is not kept."""
    former = body.previous_response_id
    return [] if former is None else found(state, former, "previous_response_id").messages


def stored_output(state: AppState, response_id: str) -> list[dict[str, Any]] | None:
    """The output of a response that is kept; None for another."""
    stored = state.responses.get(response_id)
    return None if stored is None else list(stored.record["output"])


def found(state: AppState, response_id: str, param: str | None = None) -> StoredResponse:
    """A response that is kept. ApiError 404 for another."""
    stored = state.responses.get(response_id)
    if stored is None:
        raise not_found(response_id, param)
    return stored


def not_found(response_id: str, param: str | None = None) -> ApiError:
    """The answer for a response that is not kept."""
    return ApiError(
        404,
        f"the response {response_id[:100]!r} is not kept here: it was not stored, or its time is "
        "over.",
        param=param,
        code="response_not_found",
    )
