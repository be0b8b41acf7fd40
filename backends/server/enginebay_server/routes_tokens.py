"""Routes that count, encode and decode tokens, and run no model."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from enginebay.text.token_bytes import shown_bytes
from enginebay_server.bodies import Body, TokenIdList, check_unknown
from enginebay_server.chat import ChatBody, render_chat
from enginebay_server.completions import check_text_lengths
from enginebay_server.errors import ApiError
from enginebay_server.field_limits import Name, Objects, Tools
from enginebay_server.routes_generate import as_json
from enginebay_server.served import ServedModel
from enginebay_server.state import AppState


class TokenizeBody(Body):
    """The body of /tokenize and /v1/count_tokens: a text or a conversation to encode."""

    model: Name | None = None
    prompt: str | None = None
    messages: Objects | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """The body of /detokenize: token ids to decode to a text."""

    model: Name | None = None
    tokens: TokenIdList


def token_routes(state: AppState) -> APIRouter:
    """/tokenize, /detokenize, /tokenizer_info and /v1/count_tokens."""
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        def answer() -> Response:
            headers = check_unknown(body, state.settings)
            model = state.models.find(body.model)
            token_ids = body_token_ids(model, body)
            record: dict[str, Any] = {
                "count": len(token_ids),
                "max_model_len": model.llm.config.max_model_len,
                "tokens": token_ids,
            }
            if body.return_token_strs:
                each = model.words.of_each(token_ids, begins_text=True)
                record["token_strs"] = [shown_bytes(own) for own, _ in each]
            return as_json(record, headers)

        return await state.lanes.of(request.scope).run(answer)

    @router.post("/v1/count_tokens")
    async def count_tokens(body: TokenizeBody, request: Request) -> Response:
        def answer() -> Response:
            headers = check_unknown(body, state.settings)
            model = state.models.find(body.model)
            count = len(body_token_ids(model, body))
            record = {"input_tokens": count, "max_model_len": model.llm.config.max_model_len}
            return as_json(record, headers)

        return await state.lanes.of(request.scope).run(answer)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody, request: Request) -> Response:
        def answer() -> Response:
            headers = check_unknown(body, state.settings)
            return as_json({"prompt": body_text(state.models.find(body.model), body)}, headers)

        return await state.lanes.of(request.scope).run(answer)

    @router.get("/tokenizer_info")
    async def tokenizer_info(model: str | None = None) -> Response:
        return as_json(tokenizer_record(state.models.find(model)))

    return router


def tokenizer_record(model: ServedModel) -> dict[str, Any]:
    """The special tokens of a model as texts, and its chat template; null where it has none."""
    info = model.llm.plan.checkpoint.token_info
    token_ids = {
        "bos_token": info.bos_token_id,
        "eos_token": next(iter(info.eos_token_ids), None),
        "pad_token": info.pad_token_id,
    }
    texts = {
        name: None if token_id is None else shown_bytes(model.words.of(token_id))
        for name, token_id in token_ids.items()
    }
    template = model.formats.chat.chat_template
    return {
        **texts,
        "chat_template": template or None,
        "model_max_length": model.llm.config.max_model_len,
    }


def body_text(model: ServedModel, body: DetokenizeBody) -> str:
    """The text of a body's token ids. ApiError for an id outside the vocabulary."""
    size = model.llm.plan.model.info.num_token_ids
    wrong = next((token for token in body.tokens if token >= size), None)
    if wrong is not None:
        raise ApiError(
            400,
            f"token id {wrong}. Allowed: 0 to {size - 1}. Send ids of this model, such as "
            "those that /tokenize returns.",
            param="tokens",
        )
    return model.llm.tokenizer.decode(body.tokens)


def body_token_ids(model: ServedModel, body: TokenizeBody) -> list[int]:
    """The token ids of a body's text or conversation. ApiError unless it has one of the two."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(
            400, "prompt and messages. Allowed: one of the two. Pass one.", param="prompt"
        )
    if body.prompt is not None:
        check_text_lengths([body.prompt], model, "prompt")
        is_special = body.add_special_tokens is not False
        return model.llm.tokenizer.encode(body.prompt, add_special_tokens=is_special)
    chat = ChatBody(
        messages=body.messages or [],
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
        tools=body.tools,
    )
    return render_chat(model, chat, chat.tool_use)
