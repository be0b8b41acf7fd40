"""SparseParams, what few requests ask for and no column of the row table holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from enginebay.errors import InputError, explain


@dataclasses.dataclass(frozen=True, slots=True)
class SparseParams:
    """One request's rare sampling parameters; the defaults ask for nothing."""

    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """What is added to the scores of these token ids."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only token ids that may be sampled; None allows all."""
    min_tokens: int = 0
    """New tokens before which no stop token may be sampled."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids that must not be completed."""
    num_logprobs: int | None = None
    """How many log probabilities to tell for each new token; None asks for none."""
    num_prompt_logprobs: int | None = None
    """The same for each token of the prompt."""


NOTHING = SparseParams()


def read_sparse(sampling: object, vocab_size: int) -> SparseParams:
    """What a record of sampling parameters carries of them; fields that it does not have ask for
    nothing.

    The fields are logit_bias, allowed_token_ids, min_tokens, bad_words_token_ids, logprobs (or
    num_logprobs, as FrozenSampling has it) and prompt_logprobs (likewise); -1 is the whole
    vocabulary. Raises InputError for a token id outside the vocabulary, and for an empty list of
    allowed ones.
    """
    bias = getattr(sampling, "logit_bias", None)
    allowed = getattr(sampling, "allowed_token_ids", None)
    min_tokens = getattr(sampling, "min_tokens", None)
    bad_words = getattr(sampling, "bad_words_token_ids", None)
    logprobs = getattr(sampling, "logprobs", getattr(sampling, "num_logprobs", None))
    prompt_logprobs = getattr(
        sampling, "prompt_logprobs", getattr(sampling, "num_prompt_logprobs", None)
    )
    if not (bias or min_tokens or bad_words) and allowed is logprobs is prompt_logprobs is None:
        return NOTHING
    sparse = SparseParams(
        logit_bias={int(token): float(value) for token, value in (bias or {}).items()},
        allowed_token_ids=None if allowed is None else tuple(map(int, allowed)),
        min_tokens=int(min_tokens or 0),
        bad_words_token_ids=tuple(tuple(map(int, word)) for word in bad_words or ()),
        num_logprobs=_count(logprobs, vocab_size),
        num_prompt_logprobs=_count(prompt_logprobs, vocab_size),
    )
    _check(sparse, vocab_size)
    return sparse


def _count(value: int | None, vocab_size: int) -> int | None:
    if value is None or value is False:
        return None
    return vocab_size if value == -1 else int(value)


def _check(sparse: SparseParams, vocab_size: int) -> None:
    if sparse.allowed_token_ids == ():
        raise InputError(
            explain(
                "an empty allowed_token_ids",
                "at least one token id",
                "Leave it out to allow every token.",
            )
        )
    _check_ids("logit_bias", sparse.logit_bias, vocab_size)
    _check_ids("allowed_token_ids", sparse.allowed_token_ids or (), vocab_size)
    _check_ids(
        "bad_words_token_ids", (t for word in sparse.bad_words_token_ids for t in word), vocab_size
    )


def _check_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    wrong = [token for token in token_ids if not 0 <= token < vocab_size]
    if wrong:
        raise InputError(
            explain(
                f"token ids {wrong[:5]} in {field}", f"0 to {vocab_size - 1}", "Leave them out."
            )
        )
