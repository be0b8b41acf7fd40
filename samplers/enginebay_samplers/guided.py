"""The device's part of guided decoding: each row has a mask of allowed tokens, which the host
writes before each of the row's steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from enginebay.contracts.constraint import BITS, num_words
from enginebay.contracts.processor import LogitsProcessor, ProcessorState, RowFacts, RowField, Sizes
from enginebay.contracts.sampler import SamplingState
from enginebay_samplers.masks import TokenIds
from enginebay_samplers.tokens import ban, check_ids, from_bits, to_bits


class GuidedOptions(BaseModel):
    """The first mask; later masks come from the grammar of the request."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        json_schema_extra={"examples": [{"token_ids": [2, 6, 30, 31, 32]}, {"token_ids": [8]}]},
    )

    token_ids: TokenIds | None = Field(
        default=None, description="token ids that the first mask allows; None: all"
    )


class Guided(LogitsProcessor):
    """Allows a row only the tokens whose bit is set in its mask.

    The mask is `bits` uint32 [ceil(vocab / 32)]; token i has bit i % 32 of word i // 32.
    """

    def fields(self, sizes: Sizes) -> Mapping[str, RowField]:
        """Return the field: the mask."""
        return {BITS: RowField("uint32", (num_words(sizes.vocab_size),))}

    def row(self, options: Any, facts: RowFacts) -> Mapping[str, Any]:
        """Return the mask that holds until the loop writes another one. RequestError for ids
        outside the vocabulary.
        """
        vocab = facts.sizes.vocab_size
        if options.token_ids is None:
            return {BITS: np.full(num_words(vocab), 0xFFFFFFFF, np.uint32)}
        check_ids("guided", options.token_ids, vocab)
        return {BITS: to_bits(options.token_ids, vocab)}

    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        """Return the logits with -inf where the bit is not set.

        A row without any allowed token keeps its logits; the loop then passes a token that the
        grammar refuses, and the request fails.
        """
        return ban(logits, ~from_bits(processor_state[BITS], logits.shape[-1]))
