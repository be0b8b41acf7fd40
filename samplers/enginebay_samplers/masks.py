"""The processors allowed_token_ids and min_tokens: tokens that a request makes impossible, always
or at first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import jax
import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from enginebay.constraint import num_words
from enginebay.processor import LogitsProcessor, ProcessorState, RowFacts, RowField, Sizes
from enginebay.sampler import SamplingState
from enginebay.types import MAX_STOP_TOKENS
from enginebay_samplers.tokens import (
    ban,
    check_ids,
    check_number,
    from_bits,
    is_among,
    to_bits,
)

TokenIds = Annotated[tuple[Annotated[int, Field(strict=True)], ...], Field(strict=False)]
"""Token ids: from a list too, as JSON has them."""


class AllowedTokenIdsOptions(BaseModel):
    """The tokens that may be chosen."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        json_schema_extra={"examples": [{"token_ids": [1, 5, 9, 30]}, {"token_ids": [7]}]},
    )

    token_ids: Annotated[TokenIds, Field(min_length=1)] | None = Field(
        default=None, description="at least one; None: all of them"
    )


class AllowedTokenIds(LogitsProcessor):
    """No other token is possible; where none of them is, nothing is changed."""

    def fields(self, sizes: Sizes) -> Mapping[str, RowField]:
        """The set of those allowed, a bit for each token."""
        return {"allowed": RowField("uint32", (num_words(sizes.vocab_size),))}

    def row(self, options: Any, facts: RowFacts) -> Mapping[str, Any]:
        """RequestError for ids that the model does not have."""
        vocab = facts.sizes.vocab_size
        ids = range(vocab) if options.token_ids is None else options.token_ids
        check_ids("allowed_token_ids", ids, vocab)
        return {"allowed": to_bits(ids, vocab)}

    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        """f32 [S, vocab]."""
        return ban(logits, ~from_bits(processor_state["allowed"], logits.shape[-1]))


class MinTokensOptions(BaseModel):
    """How many tokens come before one that ends the request."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [{"min_tokens": 4}, {"min_tokens": 9, "stop_token_ids": [3, 8]}]
        },
    )

    min_tokens: int = Field(default=0, ge=0, lt=2**31, description="least new tokens")
    stop_token_ids: TokenIds = Field(
        default=(), description="those that must wait, besides the request's end-of-sequence tokens"
    )


class MinTokens(LogitsProcessor):
    """Tokens that end the request are impossible before so many others were made; where no other is
    possible, they are not.
    """

    def fields(self, sizes: Sizes) -> Mapping[str, RowField]:
        """How many, and the ids, the vocabulary's size where there is none."""
        return {"min_tokens": RowField("int32"), "ids": RowField("int32", (MAX_STOP_TOKENS,))}

    def row(self, options: Any, facts: RowFacts) -> Mapping[str, Any]:
        """RequestError for too many ids, and for those that the model does not have."""
        vocab = facts.sizes.vocab_size
        stops = list(dict.fromkeys((*facts.eos_token_ids, *options.stop_token_ids)))
        check_number("end-of-sequence and stop token ids", len(stops), MAX_STOP_TOKENS)
        check_ids("min_tokens", options.stop_token_ids, vocab)
        ids = np.full(MAX_STOP_TOKENS, vocab)
        ids[: len(stops)] = stops
        return {"min_tokens": options.min_tokens, "ids": ids}

    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        """f32 [S, vocab]."""
        early = state.positions - state.prompt_lengths < processor_state["min_tokens"]
        return ban(logits, early[:, None] & is_among(processor_state["ids"], logits.shape[-1]))
