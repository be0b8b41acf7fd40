"""/v1/embeddings: pooled hidden states of the loaded model."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
from fastapi import Request

from enginebay.serving.prepare import encode_within
from enginebay.types import Pooling
from enginebay_server.bodies import Body, PromptField
from enginebay_server.completions import check_prompts, check_text_lengths
from enginebay_server.errors import ApiError
from enginebay_server.field_limits import Name
from enginebay_server.request_span import request_span
from enginebay_server.served import ServedModel
from enginebay_server.state import AppState
from enginebay_server.usage import Usage


class EmbeddingBody(Body):
    """Texts, or lists of token ids, to embed."""

    input: PromptField
    model: Name | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: Name | None = None
    pooling: Pooling | None = None
    """The mean over the tokens of a text (the default), or the hidden state of the last token."""
    normalize: bool | None = None
    """Whether embeddings are divided by their Euclidean length (the default)."""


async def embed(
    model: ServedModel, body: EmbeddingBody, state: AppState, request: Request
) -> dict[str, Any]:
    """Return the body of the answer; ApiError or RequestError for a wrong input."""
    span = request_span(request.scope)
    if span is not None:
        span.begin(model.name, None)
    given = body.input
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = cast("list[str] | list[list[int]]", [given])
    texts = cast("list[str | list[int]]", given)
    check_prompts(texts, state.settings, "input")
    check_text_lengths(texts, model, "input")
    size = model.llm.plan.model.info.hidden_size
    if body.dimensions not in (None, size):
        raise ApiError(
            400,
            f"dimensions = {body.dimensions}. Allowed: {size}, as the model has. Leave it out.",
            param="dimensions",
        )

    def tokenised() -> list[list[int]]:
        tokenizer, most = model.llm.tokenizer, model.max_prompt_tokens + 1
        return [
            encode_within(tokenizer, text, most, generates=False) if isinstance(text, str) else text
            for text in texts
        ]

    await state.limit.enter()
    try:
        prompts = await state.lanes.of(request.scope).run(tokenised)
        vectors = await model.llm.aembed(
            prompts,
            pooling=body.pooling or "mean",
            normalize=body.normalize is not False,
            tenant=body.user or None,
            lora=model.lora,
        )
    finally:
        state.limit.leave()
    usage = Usage(sum(map(len, prompts)))
    if span is not None:
        span.count_prompt(usage.num_prompt)
    is_base64 = body.encoding_format == "base64"

    def write() -> dict[str, Any]:
        return embedding_record(model, vectors, usage.num_prompt, is_base64=is_base64)

    return await state.lanes.write(sum(map(len, vectors)), write)


def embedding_record(
    model: ServedModel, vectors: Sequence[np.ndarray], num_tokens: int, *, is_base64: bool
) -> dict[str, Any]:
    """Return the body of the answer with these vectors, each f32 [hidden_size]."""
    return {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": as_base64(vector) if is_base64 else vector.tolist(),
            }
            for index, vector in enumerate(vectors)
        ],
        "model": model.name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def as_base64(vector: np.ndarray) -> str:
    """Return f32 [hidden_size] as little-endian bytes in base64."""
    return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()
