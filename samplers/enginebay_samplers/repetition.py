"""The processors no_repeat_ngram and dry: ban or penalize tokens that would repeat a part of the
text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax
from pydantic import BaseModel, ConfigDict, Field

from enginebay.contracts.constraint import num_words
from enginebay.contracts.processor import (
    LogitsProcessor,
    ProcessorState,
    RowFacts,
    RowField,
    Sizes,
    option_fields,
    option_values,
)
from enginebay.contracts.sampler import SamplingState
from enginebay.row_value import RowValue
from enginebay_samplers.masks import TokenIds
from enginebay_samplers.tokens import ban, check_ids, in_bits, is_among, to_bits

MAX_MATCH = 50
"""Max length of a repetition that dry distinguishes, as in its source."""

_Loop = tuple[Any, jax.Array, jax.Array, jax.Array]
"""Tokens compared so far, the text shifted right by them, where matches go on, and lengths."""


def _matches(
    state: SamplingState, limit: jax.Array, first: jax.Array, ends: jax.Array
) -> jax.Array:
    """int32 [S, L]: at each index, how many tokens before it equal the last tokens of the row's
    text, in order; -1 outside of the text.

    `limit` int32 [S]: the max match. `first` int32 [S]: index of the first token that counts.
    `ends` int32 [S, L]: the text, with -1 where a match must stop. Makes one pass over [S, L] per
    token of the longest match.
    """
    end, first = state.positions[:, None], first[:, None]
    index = lax.broadcasted_iota(jnp.int32, ends.shape, 1)
    inside = (index < end) & (index >= first)

    def longer(loop: _Loop) -> _Loop:
        num, shifted, going, found = loop
        num = num + 1
        shifted = jnp.roll(shifted, 1, axis=1)
        wanted = jnp.take_along_axis(ends, end - num, axis=1, mode="clip")
        going = going & (num <= limit[:, None]) & (index - num >= first) & (shifted == wanted)
        return num, shifted, going, jnp.where(going, num, found)

    start = (jnp.int32(0), state.token_ids, inside & (limit > 0)[:, None], jnp.where(inside, 0, -1))
    return lax.while_loop(lambda loop: jnp.any(loop[2]), longer, start)[3]


class NoRepeatNgramOptions(BaseModel):
    """The length of the sequences that may occur only once."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        json_schema_extra={"examples": [{"size": 1}, {"size": 2}, {"size": 3}]},
    )

    size: Annotated[int, RowValue("int32")] = Field(
        default=3, ge=1, lt=2**31, description="length in tokens of sequences that must not repeat"
    )


class NoRepeatNgram(LogitsProcessor):
    """Bans a token that would end a sequence of `size` tokens which prompt and output already
    contain.

    Follows NoRepeatNGramLogitsProcessor of Hugging Face transformers (after Paulus, Xiong and
    Socher, "A deep reinforced model for abstractive summarization", 2017, section 2.5). Nothing is
    banned if no other token is possible. Costs up to `size` passes over the rows' texts, fewer if
    no sequence of this length repeats, and one write per token of the texts.
    """

    reads_tokens = True

    def fields(self, sizes: Sizes) -> Mapping[str, RowField]:
        """Return the one field of a row: the option `size`, the length of a banned sequence."""
        return option_fields(NoRepeatNgramOptions)

    def row(self, options: Any, facts: RowFacts) -> Mapping[str, Any]:
        """Return the values of the fields; all sizes are supported."""
        return option_values(options)

    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        """Return f32 [S, vocab]."""
        vocab, before = logits.shape[-1], processor_state["size"] - 1
        found = _matches(state, before, jnp.zeros_like(before), state.token_ids)
        repeats = (found >= before[:, None]) & (found >= 0)
        return ban(logits, is_among(jnp.where(repeats, state.token_ids, vocab), vocab))


class DryOptions(BaseModel):
    """The penalty of a repetition, and which repetitions are free."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [
                {"allowed_length": 1},
                {"multiplier": 2.0, "base": 1.2, "sequence_breakers": [3, 8], "range": 12},
            ]
        },
    )

    multiplier: float = Field(
        default=0.8,
        ge=0.0,
        le=100.0,
        description="subtracted from the logit of a token that repeats `allowed_length` "
        "tokens; 0 changes nothing",
    )
    base: float = Field(
        default=1.75, ge=1.0, le=4.0, description="factor for each additional token"
    )
    allowed_length: int = Field(
        default=2,
        ge=1,
        le=MAX_MATCH,
        description="length of a repetition at which the penalty starts",
    )
    sequence_breakers: TokenIds = Field(
        default=(),
        description="token ids at which a repetition ends, such as line breaks",
    )
    range: int = Field(
        default=0, ge=0, lt=2**31, description="number of last tokens that are compared; 0: all"
    )


class Dry(LogitsProcessor):
    """Subtracts multiplier * base ** (length - allowed_length) from a token that would extend a
    repetition.

    The length is that of the longest part of prompt and output that ends the text and was followed
    by the token before. "Don't repeat yourself": P. E. Weidmann, text-generation-webui, pull
    request 5677, 2024. Costs one pass over the rows' texts per token of the longest repetition, at
    most MAX_MATCH, and one write per token of the texts.
    """

    reads_tokens = True

    def fields(self, sizes: Sizes) -> Mapping[str, RowField]:
        """Return the fields: the options; the breakers are a set of bits."""
        return {
            "multiplier": RowField("float32"),
            "base": RowField("float32"),
            "allowed_length": RowField("int32"),
            "range": RowField("int32"),
            "breakers": RowField("uint32", (num_words(sizes.vocab_size),)),
        }

    def row(self, options: Any, facts: RowFacts) -> Mapping[str, Any]:
        """Raise RequestError for ids outside the vocabulary."""
        vocab = facts.sizes.vocab_size
        check_ids("sequence_breakers", options.sequence_breakers, facts.sizes.num_token_ids)
        return {
            "multiplier": options.multiplier,
            "base": options.base,
            "allowed_length": options.allowed_length,
            "range": options.range or facts.sizes.max_model_len,
            "breakers": to_bits(options.sequence_breakers, vocab),
        }

    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        """Return f32 [S, vocab]."""
        num_rows, vocab = logits.shape
        stops = in_bits(processor_state["breakers"], state.token_ids)
        first = jnp.maximum(state.positions - processor_state["range"], 0)
        limit = jnp.where(processor_state["multiplier"] > 0.0, MAX_MATCH, 0)
        found = _matches(state, limit, first, jnp.where(stops, -1, state.token_ids))
        more = found - processor_state["allowed_length"][:, None]
        each = processor_state["multiplier"][:, None] * processor_state["base"][
            :, None
        ] ** more.astype(jnp.float32)
        each = jnp.where((more >= 0) & ~stops, each, 0.0)
        row = jnp.arange(num_rows)[:, None]
        cost = (
            jnp.zeros((num_rows, vocab), jnp.float32)
            .at[row, state.token_ids]
            .max(each, mode="drop")
        )
        return logits - cost
