"""What enters the row table: a Request or the documented record, read once and checked before
anything is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from enginebay.errors import InputError, explain
from enginebay.rows.page_table import PageTable
from enginebay.rows.sparse import SparseParams, read_sparse
from enginebay.types import MAX_STOP_TOKENS, FrozenSampling, Request, SamplingParams, key_of


class DocumentedRequest(Protocol):
    """The record that users of the documented face add instead of a Request.

    It may also have `page_ids` (one list of ints for each cache group, or the only group's list),
    `output_token_ids`, `key` (two words of a random key, by default those of the seed, or zeros)
    and `index`. `sampling_params` has the fields of SamplingParams but NOT_CARRIED, or is None for
    the defaults.
    """

    @property
    def req_id(self) -> str:
        """The request's unique id."""

    @property
    def prompt_token_ids(self) -> Sequence[int] | np.ndarray:
        """The prompt."""

    @property
    def sampling_params(self) -> Any:
        """How its tokens are sampled."""


NOT_CARRIED: Mapping[str, str] = {
    "bad_words": "Tokenise them: pass bad_words_token_ids.",
    "stop_words_ids": "Compare the row's last tokens with them where you run the steps.",
    "no_repeat_ngram_size": "",
    "typical_p": "",
    "suppress_repetition_in_generation": "",
    "processors": "",
    "json_schema": "",
    "json_object": "",
    "regex": "",
    "choice": "",
    "grammar": "",
}
"""Fields of SamplingParams that no column of the table holds, and what to do about each; "" is
LLM.generate.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class DocumentedRecord:
    """The least DocumentedRequest."""

    req_id: str
    prompt_token_ids: Sequence[int] | np.ndarray
    sampling_params: SamplingParams | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A request as its row will hold it."""

    request: Request
    token_ids: np.ndarray
    """int32: the prompt, then output it brings along, cut to the row's length."""
    num_prompt_tokens: int
    page_ids: tuple[np.ndarray, ...]
    """int32 for each cache group; () when the request brings none."""
    sparse: SparseParams


def read_entry(
    request: Request | DocumentedRequest,
    max_model_len: int,
    vocab_size: int,
    page_tables: Sequence[PageTable],
) -> Entry:
    """What to write for a request.

    InputError for more pages, stop tokens or cache groups than there is room for, and for a field
    of NOT_CARRIED.
    """
    record = (
        request if isinstance(request, Request) else _as_request(request, max_model_len, vocab_size)
    )
    num_stops = len(record.sampling.stop_token_ids)
    if num_stops > MAX_STOP_TOKENS:
        raise InputError(
            explain(f"{num_stops} stop tokens", f"at most {MAX_STOP_TOKENS}", "Give fewer.")
        )
    token_ids = np.asarray(record.prompt_token_ids[:max_model_len], np.int32)
    num_prompt_tokens = len(token_ids)
    output = getattr(request, "output_token_ids", None)
    if output is not None and len(output):
        room = max_model_len - num_prompt_tokens
        token_ids = np.concatenate([token_ids, np.asarray(output[:room], np.int32)])
    pages = _read_pages(getattr(request, "page_ids", None), page_tables)
    # The documented record's own sampling parameters: FrozenSampling does not have all that they
    # may carry.
    sampling = record.sampling if record is request else getattr(request, "sampling_params", None)
    return Entry(record, token_ids, num_prompt_tokens, pages, read_sparse(sampling, vocab_size))


def free_row(
    req_id: str, req_index: int | None, rows: Mapping[str, int], requests: Sequence[Request | None]
) -> int:
    """Row `req_index`, or the lowest free one for None; see SequenceBuffer.add_request for the
    errors.
    """
    if req_id in rows:
        given, todo = f"request id {req_id!r}", f"It is in row {rows[req_id]}: remove it first."
        raise InputError(explain(given, "an id that is not in the table", todo))
    default = "Leave req_index out for the lowest free row."
    if req_index is None:
        row = next((row for row, request in enumerate(requests) if request is None), None)
        if row is None:
            given = f"request {req_id!r} for a table whose {len(requests)} rows are taken"
            raise RuntimeError(
                explain(given, "a free row", "Remove a request first, or raise max_num_reqs.")
            )
        return row
    if not 0 <= req_index < len(requests):
        raise IndexError(explain(f"row {req_index}", f"0 to {len(requests) - 1}", default))
    if requests[req_index] is not None:
        raise InputError(explain(f"row {req_index}, which is taken", "a free row", default))
    return req_index


def _as_request(request: DocumentedRequest, max_model_len: int, vocab_size: int) -> Request:
    missing = [
        name
        for name in ("req_id", "prompt_token_ids", "sampling_params")
        if not hasattr(request, name)
    ]
    if missing:
        raise InputError(
            explain(
                f"a {type(request).__name__} without {', '.join(missing)}",
                "a Request, or a record with req_id, prompt_token_ids and sampling_params",
                "Add what is missing.",
            )
        )
    _refuse_not_carried(request.sampling_params)
    prompt = np.asarray(request.prompt_token_ids, np.int32)
    seed = getattr(request.sampling_params, "seed", None) or 0
    return Request(
        request_id=request.req_id,
        prompt_token_ids=prompt,
        sampling=_frozen(request.sampling_params, max(max_model_len - len(prompt), 0), vocab_size),
        key=getattr(request, "key", key_of(seed)),
        arrival_s=0.0,
        index=getattr(request, "index", 0),
    )


def _refuse_not_carried(sampling: object) -> None:
    """InputError for a field whose value is not its default and that the table would drop."""
    if sampling is None or isinstance(sampling, FrozenSampling):
        return
    defaults = SamplingParams()
    for name, todo in NOT_CARRIED.items():
        neutral = getattr(defaults, name)
        value = getattr(sampling, name, neutral)
        if value not in (None, neutral) and value != []:
            default_todo = "Leave it out, or generate with LLM.generate, which applies it."
            raise InputError(
                explain(
                    f"{name} = {value!r} for a row table, which does not hold it",
                    f"{neutral!r}",
                    todo or default_todo,
                )
            )


def _frozen(sampling: object, room: int, vocab_size: int) -> FrozenSampling:
    """The fields that FrozenSampling has, from a record that may lack some; `room` is for new
    tokens.
    """
    if isinstance(sampling, FrozenSampling):
        return sampling
    defaults = SamplingParams()
    values = {}
    for field in dataclasses.fields(FrozenSampling):
        usual = (
            field.default
            if field.default is not dataclasses.MISSING
            else getattr(defaults, field.name)
        )
        values[field.name] = getattr(sampling, field.name, usual)
    values["max_tokens"] = room if values["max_tokens"] is None else values["max_tokens"]
    values["stop_token_ids"] = tuple(values["stop_token_ids"] or ())
    values["processors"] = ()
    sparse = read_sparse(sampling, vocab_size)
    values["num_logprobs"], values["num_prompt_logprobs"] = (
        sparse.num_logprobs,
        sparse.num_prompt_logprobs,
    )
    return FrozenSampling(**values)


def _read_pages(page_ids: Any, page_tables: Sequence[PageTable]) -> tuple[np.ndarray, ...]:
    if page_ids is None or len(page_ids) == 0:
        return ()
    groups = [page_ids] if np.ndim(page_ids[0]) == 0 else page_ids
    if len(groups) != len(page_tables):
        raise InputError(
            explain(
                f"page ids for {len(groups)} cache groups",
                f"lists for all {len(page_tables)} groups, in the order of page_sizes",
                "Give each group its list, an empty one if need be.",
            )
        )
    for group, table in zip(groups, page_tables, strict=True):
        table.check_fits(len(group))
    return tuple(np.asarray(group, np.int32) for group in groups)
