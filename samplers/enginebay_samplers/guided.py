"""The device's part of guided decoding: a row's mask of allowed tokens, which the host writes anew before each of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import BaseModel, ConfigDict

from enginebay.constraint import BITS, num_words
from enginebay.processor import LogitsProcessor, Own, RowFacts, RowField, Sizes
from enginebay.sampler import SamplingState


class GuidedOptions(BaseModel):
    """None: the masks come from a request's grammar."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra={"examples": [{}]})


class Guided(LogitsProcessor):
    """Leaves a row the tokens whose bit is set in `bits` uint32 [ceil(vocab / 32)]: bit i % 32 of word i // 32 for token i."""

    def fields(self, sizes: Sizes) -> Mapping[str, RowField]:
        """The mask."""
        return {BITS: RowField("uint32", (num_words(sizes.vocab_size),))}

    def row(self, options: Any, facts: RowFacts) -> Mapping[str, Any]:
        """Everything is allowed until the loop writes a mask."""
        del options
        return {BITS: np.full(num_words(facts.sizes.vocab_size), 0xFFFFFFFF, np.uint32)}

    def __call__(self, logits: jax.Array, own: Own, state: SamplingState) -> jax.Array:
        """The logits, -inf where the bit is not set."""
        del state
        words = own[BITS]
        single = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
        allowed = single.reshape(words.shape[0], -1)[:, : logits.shape[1]] != 0
        return jnp.where(allowed, logits, -jnp.inf)
