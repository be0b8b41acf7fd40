"""The processor bad_words: sequences of tokens that a request must not contain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from enginebay.contracts.processor import LogitsProcessor, ProcessorState, RowFacts, RowField, Sizes
from enginebay.contracts.sampler import SamplingState
from enginebay.errors import RequestError
from enginebay_samplers.masks import TokenIds
from enginebay_samplers.tokens import ban, check_ids, check_number, is_among

MAX_SEQUENCES = 256
"""Max number of sequences of a request."""

MAX_LENGTH = 16
"""Max number of tokens of a sequence."""

ANY, NONE = -1, -2
"""Markers in the arrays. ANY in a sequence matches every position, also one before the text. NONE
marks positions before the text, and equals no token.
"""


class BadWordsOptions(BaseModel):
    """Options of the processor bad_words."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        json_schema_extra={"examples": [{"sequences": [[3], [1, 2], [2, 2, 5], [30, 31, 32, 33]]}]},
    )

    sequences: Annotated[
        tuple[Annotated[TokenIds, Field(min_length=1)], ...], Field(strict=False)
    ] = Field(
        default=(),
        description=f"banned lists of token ids: at most {MAX_SEQUENCES} lists, each of at most "
        f"{MAX_LENGTH} tokens",
    )


class BadWords(LogitsProcessor):
    """Makes the last token of a sequence impossible after the tokens before it.

    The text is the prompt and the output. This is NoBadWordsLogitsProcessor of Hugging Face
    transformers. A row without another possible token is not changed.
    """

    reads_tokens = True

    def fields(self, sizes: Sizes) -> Mapping[str, RowField]:
        """Return the last token of each sequence and the tokens before it.

        Unused sequences have the vocabulary's size as last token.
        """
        return {
            "last": RowField("int32", (MAX_SEQUENCES,)),
            "before": RowField("int32", (MAX_SEQUENCES, MAX_LENGTH - 1)),
        }

    def row(self, options: Any, facts: RowFacts) -> Mapping[str, Any]:
        """Return the arrays of a row.

        RequestError for too many or too long sequences, and for ids outside the vocabulary.
        """
        vocab, sequences = facts.sizes.vocab_size, options.sequences
        check_number("bad words", len(sequences), MAX_SEQUENCES)
        last = np.full(MAX_SEQUENCES, vocab)
        before = np.full((MAX_SEQUENCES, MAX_LENGTH - 1), ANY)
        for i, ids in enumerate(sequences):
            check_ids("bad_words", ids, facts.sizes.num_token_ids)
            if len(ids) > MAX_LENGTH:
                raise RequestError(
                    f"a bad word of {len(ids)} tokens, which begins with {ids[:4]}",
                    f"at most {MAX_LENGTH} tokens",
                    "Pass only its first tokens: then the whole sequence is impossible too.",
                )
            last[i] = ids[-1]
            before[i, MAX_LENGTH - len(ids) :] = ids[:-1]
        return {"last": last, "before": before}

    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        """Return the changed logits, f32 [S, vocab]."""
        vocab = logits.shape[-1]
        where = state.positions[:, None] - jnp.arange(MAX_LENGTH - 1, 0, -1)
        tail = jnp.take_along_axis(state.token_ids, jnp.maximum(where, 0), axis=-1)
        tail = jnp.where(where >= 0, tail, NONE)[:, None]
        begun = jnp.all(
            (processor_state["before"] == ANY) | (processor_state["before"] == tail), axis=-1
        )
        return ban(logits, is_among(jnp.where(begun, processor_state["last"], vocab), vocab))
