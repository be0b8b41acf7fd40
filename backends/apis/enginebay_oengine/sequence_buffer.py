"""SequenceBuffer: the documented API of a row table, with tokens, counts, pages and sampling
parameters of every request.

>>> buffer = SequenceBuffer(
...     max_num_reqs=32,
...     max_model_len=2048,
...     max_num_batched_tokens=4096,
...     vocab_size=50000,
...     page_sizes=[16, 32],
... )
>>> buffer.begin_sequence("req_1", [1, 2, 3])
>>> batch = buffer.prepare_batch()
>>> batch.token_ids.tolist()
[1, 2, 3]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from enginebay.contracts.rows import EngineRows
from enginebay.errors import InputError
from enginebay.types import MAX_STOP_TOKENS, ROW_VALUES, Request, SamplingParams
from enginebay_oengine.documented_rows import (
    NOTHING,
    DocumentedRecord,
    DocumentedRequest,
    SparseParams,
    as_request,
    read_page_ids,
    read_sparse,
)
from enginebay_oengine.row_batch import ModelRunBatch, make_batch
from enginebay_runtime.rows import RowTable

ALWAYS_ACTIVE = ("temperature", "top_p", "top_k")
"""Parameters that get_active_sampling_params() returns for every request."""


class SamplingColumn:
    """[max_num_reqs] values of a field of SamplingParams, computed from the requests at each
    access.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, view: SequenceBuffer, owner: type) -> np.ndarray:
        return view.column(self._name)


class SequenceBuffer:
    """A view of a RowTable, `table`, with up to `max_num_reqs` requests, one per row. Methods
    change the table in place and return None.

    The view has no arrays of its own. These columns belong to the table::

        token_ids            int32 [max_num_reqs, max_model_len]   prompt, output, then 0
        num_tokens           int32 [max_num_reqs]                  prompt and output tokens
        num_prompt_tokens    int32 [max_num_reqs]
        num_computed_tokens  int32 [max_num_reqs]                  tokens in the cache
        returns_logprobs     bool [max_num_reqs]                   whether it requests logprobs
        variants             int8 [max_num_reqs]                   the smallest StepVariant for it

    These columns are computed from the requests at each access, so writing to them has no effect::

        temperature, top_p, top_k, min_p,
        frequency_penalties, presence_penalties, repetition_penalties
                             [max_num_reqs]                        dtypes, and neutral values in
                                                                   free rows, as SamplingParams
                                                                   declares them
        stop_token_ids       int32 [max_num_reqs, MAX_STOP_TOKENS] padded with -1
        keys                 uint32 [max_num_reqs, 2]              the request's random key

    `page_tables` has a PageTable for each entry of page_sizes. `sparse` has a SparseParams per row.
    """

    temperature = SamplingColumn("temperature")
    top_p = SamplingColumn("top_p")
    top_k = SamplingColumn("top_k")
    min_p = SamplingColumn("min_p")
    frequency_penalties = SamplingColumn("frequency_penalty")
    presence_penalties = SamplingColumn("presence_penalty")
    repetition_penalties = SamplingColumn("repetition_penalty")

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        vocab_size: int,
        page_sizes: Sequence[int],
        sharding: Any = None,
    ) -> None:
        """Make a view of a new table. `page_sizes`: the page size of each cache group. InputError
        for a size below 1.

        `sharding` (a jax.sharding.Sharding) places the device arrays made from this table; None is
        JAX's default device.
        """
        sizes = (max_num_reqs, max_model_len, max_num_batched_tokens, vocab_size)
        self._look_at(RowTable(*sizes, page_sizes), sharding)

    @classmethod
    def of(cls, table: EngineRows, sharding: Any = None) -> Self:
        """Make a view of an existing table, such as `llm.engine.rows`. Read an engine's table on
        the engine's thread only, and do not change it. InputError for a table of another class.
        """
        if not isinstance(table, RowTable):
            raise InputError(
                f"a {type(table).__name__}",
                "a RowTable, which engines made of StepEngine have",
                "Pass llm.engine.rows of such an engine.",
            )
        view = cls.__new__(cls)
        view._look_at(table, sharding)
        return view

    def _look_at(self, table: RowTable, sharding: Any) -> None:
        self.table = table
        self.sharding = sharding
        self.max_num_reqs = table.max_num_reqs
        self.max_model_len = table.max_model_len
        self.max_num_batched_tokens = table.max_num_batched_tokens
        self.vocab_size = table.vocab_size
        self.page_sizes = table.page_sizes
        self.token_ids = table.token_ids
        self.num_tokens = table.num_tokens
        self.num_prompt_tokens = table.num_prompt_tokens
        self.num_computed_tokens = table.num_computed_tokens
        self.returns_logprobs = table.returns_logprobs
        self.variants = table.variants
        self.page_tables = table.page_tables

    def column(self, name: str) -> np.ndarray:
        """Return [max_num_reqs] values of a field of SamplingParams that the device stores
        per row.
        """
        declared = ROW_VALUES[name]
        values = [
            declared.neutral if one is None else declared.clip(getattr(one.sampling.params, name))
            for one in self.table.requests
        ]
        return np.asarray(values, declared.dtype)

    @property
    def stop_token_ids(self) -> np.ndarray:
        """int32 [max_num_reqs, MAX_STOP_TOKENS], padded with -1."""
        column = np.full((self.max_num_reqs, MAX_STOP_TOKENS), -1, np.int32)
        for row in self.taken_rows:
            stops = self.request(row).sampling.stop_token_ids
            column[row, : len(stops)] = stops
        return column

    @property
    def keys(self) -> np.ndarray:
        """uint32 [max_num_reqs, 2]: the random key of each request."""
        values = [(0, 0) if one is None else one.key for one in self.table.requests]
        return np.asarray(values, np.uint32)

    @property
    def sparse(self) -> list[SparseParams]:
        """The rare sampling parameters of each row."""
        return [
            NOTHING if one is None else read_sparse(one.sampling, self.vocab_size)
            for one in self.table.requests
        ]

    @property
    def num_reqs(self) -> int:
        """Number of requests."""
        return self.table.num_reqs

    @property
    def req_ids(self) -> list[str]:
        """The ids of the requests in row order."""
        return [request.request_id for request in self.table.requests if request is not None]

    @property
    def taken_rows(self) -> np.ndarray:
        """The rows with a request, in order (int32)."""
        return self.table.taken_rows

    @property
    def all_greedy(self) -> bool:
        """Whether all requests are greedy; True for an empty table."""
        return not self.temperature.any()

    @property
    def all_random(self) -> bool:
        """Whether no request is greedy; True for an empty table."""
        return np.count_nonzero(self.temperature) == self.num_reqs

    @property
    def no_top_p(self) -> bool:
        """Whether top_p has no effect on any request."""
        return bool((self.top_p >= 1).all())

    @property
    def no_top_k(self) -> bool:
        """Whether top_k has no effect on any request."""
        top_k = self.top_k
        return not ((top_k > 0) & (top_k < self.vocab_size)).any()

    @property
    def no_min_p(self) -> bool:
        """Whether min_p has no effect on any request."""
        return not self.min_p.any()

    @property
    def no_penalties(self) -> bool:
        """Whether no request has a frequency, presence or repetition penalty."""
        return not len(self.get_request_indices_with_penalty())

    @property
    def no_allowed_token_ids(self) -> bool:
        """Whether every request allows every token."""
        return all(sparse.allowed_token_ids is None for sparse in self.sparse)

    @property
    def no_prompt_logprob(self) -> bool:
        """Whether no request has prompt_logprobs."""
        return all(sparse.num_prompt_logprobs is None for sparse in self.sparse)

    @property
    def max_num_logprobs(self) -> int | None:
        """The max number of log-probabilities per new token of any request; None if there
        are none.
        """
        return max(
            (s.num_logprobs for s in self.sparse if s.num_logprobs is not None), default=None
        )

    def row_of(self, req_id: str) -> int | None:
        """Return the row of a request, or None."""
        return self.table.row_of(req_id)

    def request(self, row: int) -> Request:
        """Return the request in a row. AssertionError for a free row, or an index out of range."""
        return self.table.request(row)

    def get_active_sampling_params(self, req_index: int) -> dict[str, Any]:
        """Return a row's temperature, top_p, top_k, and its other parameters with a non-neutral
        value.

        Returns {} for a free row, and for an index out of range.
        """
        if not 0 <= req_index < self.max_num_reqs or self.table.requests[req_index] is None:
            return {}
        values = {name: self.column(name)[req_index].item() for name in ROW_VALUES}
        return {
            name: value
            for name, value in values.items()
            if name in ALWAYS_ACTIVE or value != ROW_VALUES[name].neutral
        }

    def get_request_indices_with_penalty(self) -> np.ndarray:
        """Return the rows with a frequency, presence or repetition penalty, in order (int32)."""
        rows = [row for row in self.taken_rows if self.request(row).sampling.penalises]
        return np.asarray(rows, np.int32)

    def begin_sequence(
        self,
        req_id: str,
        prompt_token_ids: Sequence[int] | np.ndarray,
        sampling: SamplingParams | None = None,
    ) -> None:
        """add_request() for a prompt with these sampling parameters (default: greedy);
        same errors.
        """
        self.add_request(DocumentedRecord(req_id, prompt_token_ids, sampling))

    def prepare_batch(self) -> ModelRunBatch:
        """Return the batch of the next step. The caller updates num_computed_tokens after
        the step.
        """
        return make_batch(self.table)

    def add_request(
        self, request: Request | DocumentedRequest, req_index: int | None = None
    ) -> None:
        """Put a request into row `req_index`, by default the lowest free row.

        The prompt is truncated to max_model_len, and output tokens of the record to the room that
        is left. ValueError for an id that is in the table, a taken row, or a request that does not
        fit; IndexError for a row out of range; RuntimeError when all rows are taken. The table is
        unchanged after an error.
        """
        made = as_request(request, self.max_model_len, self.vocab_size)
        num_stops = len(made.sampling.stop_token_ids)
        if num_stops > MAX_STOP_TOKENS:
            raise InputError(
                f"{num_stops} stop tokens",
                f"at most {MAX_STOP_TOKENS}",
                "Pass fewer stop_token_ids.",
            )
        read_sparse(made.sampling, self.vocab_size)
        pages = read_page_ids(getattr(request, "page_ids", None), self.page_tables)
        row = self.table.add_request(made, req_index)
        output = getattr(request, "output_token_ids", None)
        if output is not None:
            self.append_tokens(row, output[: self.max_model_len - self.num_prompt_tokens[row]])
        for table, page_ids in zip(self.page_tables, pages, strict=False):
            table.append(row, page_ids)

    def append_tokens(self, row: int, token_ids: Sequence[int] | np.ndarray) -> None:
        """Append output tokens to a taken row. ValueError, and no change, when they exceed
        max_model_len.
        """
        self.table.append_tokens(row, token_ids)

    def remove_request(self, req_id: str) -> int | None:
        """Free a request's row and reset its columns. Returns the row, or None for an
        unknown id.
        """
        return self.table.remove_request(req_id)

    def swap_states(self, i1: int, i2: int) -> None:
        """Swap two taken rows, with all columns. AssertionError when one of them is free."""
        self.request(i1), self.request(i2)
        exchange_rows(self.table, i1, i2)

    def condense(self, empty_req_indices: Sequence[int]) -> None:
        """Move the last requests into free rows, lowest first, so that rows 0..num_reqs-1 are
        taken.

        `empty_req_indices` is ignored, because the table knows its free rows.
        """
        del empty_req_indices
        taken = self.taken_rows
        holes = sorted(set(range(len(taken))) - set(taken.tolist()))
        for hole, last in zip(holes, taken[::-1], strict=False):
            exchange_rows(self.table, hole, int(last))

    def clear(self) -> None:
        """Free all rows; the capacity stays."""
        self.table.clear()


def exchange_rows(table: RowTable, i1: int, i2: int) -> None:
    """Exchange all data of two rows, taken or free."""
    width = max(table.num_tokens[i1], table.num_tokens[i2])
    pair, other = [i1, i2], [i2, i1]
    table.token_ids[pair, :width] = table.token_ids[other, :width]
    for column in table.columns:
        column[pair] = column[other]
    for pages in table.page_tables:
        pages.page_ids[pair] = pages.page_ids[other]
        pages.num_pages[pair] = pages.num_pages[other]
    table.requests[i1], table.requests[i2] = table.requests[i2], table.requests[i1]
    for row in pair:
        if (moved := table.requests[row]) is not None:
            table.row_by_id[moved.request_id] = row
