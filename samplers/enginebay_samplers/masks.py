"""The processors allowed_token_ids and min_tokens, which make tokens impossible, always or at
first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import jax
import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from enginebay.contracts.constraint import num_words
from enginebay.contracts.processor import LogitsProcessor, ProcessorState, RowFacts, RowField, Sizes
from enginebay.contracts.sampler import SamplingState
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
    """Options of the processor allowed_token_ids."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        json_schema_extra={"examples": [{"token_ids": [1, 5, 9, 30]}, {"token_ids": [7]}]},
    )

    token_ids: Annotated[TokenIds, Field(min_length=1)] | None = Field(
        default=None, description="ids of the allowed tokens, at least one; None: all tokens"
    )


class AllowedTokenIds(LogitsProcessor):
    """Makes all other tokens impossible. A row without a possible token is not changed."""

    def fields(self, sizes: Sizes) -> Mapping[str, RowField]:
        """Return the set of allowed tokens, one bit per token."""
        return {"allowed": RowField("uint32", (num_words(sizes.vocab_size),))}

    def row(self, options: Any, facts: RowFacts) -> Mapping[str, Any]:
        """Return the arrays of a row; RequestError for ids outside the vocabulary."""
        vocab = facts.sizes.vocab_size
        ids = range(vocab) if options.token_ids is None else options.token_ids
        if options.token_ids is not None:
            check_ids("allowed_token_ids", ids, facts.sizes.num_token_ids)
        return {"allowed": to_bits(ids, vocab)}

    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        """f32 [S, vocab]."""
        return ban(logits, ~from_bits(processor_state["allowed"], logits.shape[-1]))


class MinTokensOptions(BaseModel):
    """Options of the processor min_tokens."""

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
    """Makes the tokens that end the request impossible until `min_tokens` tokens were generated.

    A row without another possible token is not changed.
    """

    def fields(self, sizes: Sizes) -> Mapping[str, RowField]:
        """Return the number and the ids (the vocabulary's size in unused places)."""
        return {"min_tokens": RowField("int32"), "ids": RowField("int32", (MAX_STOP_TOKENS,))}

    def row(self, options: Any, facts: RowFacts) -> Mapping[str, Any]:
        """Return a row's arrays; RequestError for too many ids or ids outside the vocabulary."""
        vocab = facts.sizes.vocab_size
        stops = list(dict.fromkeys((*facts.eos_token_ids, *options.stop_token_ids)))
        check_number("end-of-sequence and stop token ids", len(stops), MAX_STOP_TOKENS)
        check_ids("min_tokens", options.stop_token_ids, facts.sizes.num_token_ids)
        ids = np.full(MAX_STOP_TOKENS, vocab)
        ids[: len(stops)] = stops
        return {"min_tokens": options.min_tokens, "ids": ids}

    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        """f32 [S, vocab]."""
        early = state.positions - state.prompt_lengths < processor_state["min_tokens"]
        return ban(logits, early[:, None] & is_among(processor_state["ids"], logits.shape[-1]))
