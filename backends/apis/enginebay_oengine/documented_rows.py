"""Conversion of the documented request records to the core's Request, and their rare sampling
parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from enginebay.errors import InputError
from enginebay.types import ROW_VALUES, FrozenSampling, Request, SamplingParams, key_of
from enginebay_runtime.rows import PageTable
from enginebay_shared.params import unapplied


class DocumentedRequest(Protocol):
    """The record that users of SequenceBuffer may add instead of a Request.

    Optional attributes: `page_ids` (one list of ints per cache group, or one list for a single
    group), `output_token_ids`, `key` (two words of a random key; by default the key of the seed, or
    zeros) and `index`. `sampling_params` has the fields of CARRIED; None is the defaults.
    """

    @property
    def req_id(self) -> str:
        """The request's unique id."""

    @property
    def prompt_token_ids(self) -> Sequence[int] | np.ndarray:
        """The token ids of the prompt."""

    @property
    def sampling_params(self) -> Any:
        """The sampling parameters, or None."""


CARRIED = frozenset(
    {
        *ROW_VALUES,
        "max_tokens",
        "seed",
        "stop_token_ids",
        "ignore_eos",
        "logprobs",
        "prompt_logprobs",
        "min_tokens",
        "logit_bias",
        "allowed_token_ids",
        # of the caller, who makes the completions and their texts
        "n",
        "best_of",
        "stop",
        "include_stop_str_in_output",
        "skip_special_tokens",
    }
)
"""The fields of SamplingParams that a record may set."""

ADVICE: Mapping[str, str] = {
    "bad_words": "Pass bad_words_token_ids, the token ids of these words.",
    "stop_words_ids": "Omit it, and compare the row's last tokens with it after each step.",
}
"""What to do instead of setting a field that the row table cannot store."""


@dataclasses.dataclass(frozen=True, slots=True)
class DocumentedRecord:
    """A DocumentedRequest with the required fields only."""

    req_id: str
    prompt_token_ids: Sequence[int] | np.ndarray
    sampling_params: SamplingParams | None = None


@dataclasses.dataclass(frozen=True)
class DocumentedSampling(FrozenSampling):
    """FrozenSampling with rare parameters that no logits processor applies here."""

    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words_token_ids: Sequence[Sequence[int]] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class SparseParams:
    """One request's rare sampling parameters; the defaults have no effect."""

    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Values that are added to the scores of these token ids."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only token ids that may be sampled; None allows all."""
    min_tokens: int = 0
    """Number of new tokens before which no stop token may be sampled."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids that must not appear in the output."""
    num_logprobs: int | None = None
    """Number of log-probabilities per new token; None for none."""
    num_prompt_logprobs: int | None = None
    """Number of log-probabilities per prompt token; None for none."""


NOTHING = SparseParams()


def read_sparse(sampling: object, vocab_size: int) -> SparseParams:
    """Read the rare parameters of a record of sampling parameters; absent fields have no effect.

    The fields are logit_bias, allowed_token_ids, min_tokens, bad_words_token_ids, logprobs (or
    num_logprobs, as in FrozenSampling) and prompt_logprobs (or num_prompt_logprobs); -1 is the
    whole vocabulary. InputError for a token id outside the vocabulary, and for an empty
    allowed_token_ids.
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
            "an empty allowed_token_ids",
            "at least one token id",
            "Pass None to allow every token.",
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
            f"token ids {wrong[:5]} in {field}", f"0 to {vocab_size - 1}", "Remove them."
        )


def as_request(record: Request | DocumentedRequest, max_model_len: int, vocab_size: int) -> Request:
    """Return the Request for a documented record. InputError for missing fields, and for sampling
    fields outside CARRIED.
    """
    if isinstance(record, Request):
        return record
    fields = ("req_id", "prompt_token_ids", "sampling_params")
    missing = [name for name in fields if not hasattr(record, name)]
    if missing:
        raise InputError(
            f"a {type(record).__name__} without {', '.join(missing)}",
            "a Request, or a record with req_id, prompt_token_ids and sampling_params",
            f"Add {missing[0]} to the record.",
        )
    prompt = np.asarray(record.prompt_token_ids, np.int32)
    sampling = record.sampling_params
    if not isinstance(sampling, FrozenSampling):
        sampling = _frozen(sampling, max(max_model_len - len(prompt), 0), vocab_size)
    return Request(
        request_id=record.req_id,
        prompt_token_ids=prompt,
        sampling=sampling,
        key=getattr(record, "key", key_of(getattr(record.sampling_params, "seed", None) or 0)),
        arrival_s=0.0,
        index=getattr(record, "index", 0),
    )


def _frozen(sampling: object, room: int, vocab_size: int) -> DocumentedSampling:
    """Convert a record, which may lack fields; `room` is the max number of new tokens."""
    for name, value, default in unapplied(sampling, CARRIED):
        if value != []:
            raise InputError(
                f"{name} = {value!r}, which a row table cannot store",
                f"{default!r}",
                ADVICE.get(name, "Omit it, or use LLM.generate, which applies it."),
            )
    fields = SamplingParams.model_fields
    known = {name: getattr(sampling, name) for name in fields if hasattr(sampling, name)}
    found = {k: v for k, v in known.items() if v is not None or k == "max_tokens"}
    params = SamplingParams.model_construct(**found)
    sparse = read_sparse(sampling, vocab_size)
    return DocumentedSampling(
        room if params.max_tokens is None else params.max_tokens,
        params,
        tuple(params.stop_token_ids or ()),
        sparse.num_logprobs,
        sparse.num_prompt_logprobs,
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        bad_words_token_ids=getattr(sampling, "bad_words_token_ids", None) or (),
    )


def read_page_ids(page_ids: Any, page_tables: Sequence[PageTable]) -> tuple[np.ndarray, ...]:
    """Return page ids int32 for each cache group; () for a record without pages. InputError for a
    wrong number of groups, or too many pages.
    """
    if page_ids is None or len(page_ids) == 0:
        return ()
    groups = [page_ids] if np.ndim(page_ids[0]) == 0 else page_ids
    if len(groups) != len(page_tables):
        raise InputError(
            f"page ids for {len(groups)} cache groups",
            f"lists for all {len(page_tables)} groups, in the order of page_sizes",
            "Pass one list per group; a list may be empty.",
        )
    for group, table in zip(groups, page_tables, strict=True):
        table.check_memory(len(group))
    return tuple(np.asarray(group, np.int32) for group in groups)
