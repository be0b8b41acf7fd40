"""SequenceBuffer, the loop's table of rows: tokens, counts, pages and sampling parameters of every
admitted request.

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
from typing import Any

import numpy as np

from enginebay.errors import InputError, UnsupportedError, explain
from enginebay.rows.batch import ModelRunBatch, make_batch
from enginebay.rows.page_table import PageTable
from enginebay.rows.requests import DocumentedRecord, DocumentedRequest, free_row, read_entry
from enginebay.rows.sparse import NOTHING, SparseParams
from enginebay.types import MAX_STOP_TOKENS, Request, SamplingParams


class SequenceBuffer:
    """Host state of up to `max_num_reqs` requests, one row each; methods change it in place and
    return None.

    Columns (NumPy, first axis is the row; a free row holds each column's initial value)::

        token_ids            int32 [max_num_reqs, max_model_len]   prompt, then output; 0 from num_tokens on
        num_tokens           int32 [max_num_reqs]                  prompt and output tokens
        num_prompt_tokens    int32 [max_num_reqs]
        num_computed_tokens  int32 [max_num_reqs]                  tokens whose keys and values are in the cache
        temperature, top_p, min_p  f32 [max_num_reqs]              initially 0, 1, 0
        top_k                int32 [max_num_reqs]                  0 keeps all
        frequency_penalties, presence_penalties, repetition_penalties
                             f32 [max_num_reqs]                    initially 0, 0, 1
        stop_token_ids       int32 [max_num_reqs, MAX_STOP_TOKENS] padded with -1
        keys                 uint32 [max_num_reqs, 2]              the request's own random key
        returns_logprobs       bool [max_num_reqs]                   whether log-probabilities of new tokens are asked for
        variants             int8 [max_num_reqs]                   the least StepVariant that serves the row

    Besides the columns, `page_tables` has a PageTable for each entry of page_sizes, and `sparse` a
    row's SparseParams. In an engine's table the pages are those that its ledger has promised the
    row; they are copied into the arrays of each step.

    `token_ids` is allocated at full size: the operating system hands its zeroed pages out when they
    are first written, and a row's tokens lie together, so 256 rows of 128k tokens cost what their
    requests use and not 128 MB.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        vocab_size: int,
        page_sizes: Sequence[int],
        sharding: Any = None,
    ) -> None:
        """`page_sizes`: the page size of each cache group. Raises InputError for a count below 1.

        `sharding` (a jax.sharding.Sharding) places the device arrays packed from this table; None
        is JAX's default device.
        """
        _check_counts([max_num_reqs, max_model_len, max_num_batched_tokens, vocab_size], page_sizes)
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.vocab_size = vocab_size
        self.page_sizes = list(page_sizes)
        self.sharding = sharding
        self.token_ids = _make_tokens(max_num_reqs, max_model_len)
        self.num_tokens = np.zeros(max_num_reqs, np.int32)
        self.num_prompt_tokens = np.zeros(max_num_reqs, np.int32)
        self.num_computed_tokens = np.zeros(max_num_reqs, np.int32)
        self.temperature = np.zeros(max_num_reqs, np.float32)
        self.top_p = np.ones(max_num_reqs, np.float32)
        self.min_p = np.zeros(max_num_reqs, np.float32)
        self.top_k = np.zeros(max_num_reqs, np.int32)
        self.frequency_penalties = np.zeros(max_num_reqs, np.float32)
        self.presence_penalties = np.zeros(max_num_reqs, np.float32)
        self.repetition_penalties = np.ones(max_num_reqs, np.float32)
        self.stop_token_ids = np.full((max_num_reqs, MAX_STOP_TOKENS), -1, np.int32)
        self.keys = np.zeros((max_num_reqs, 2), np.uint32)
        self.returns_logprobs = np.zeros(max_num_reqs, bool)
        self.variants = np.zeros(max_num_reqs, np.int8)
        self.page_tables = tuple(
            PageTable(max_num_reqs, -(-max_model_len // size), size) for size in page_sizes
        )
        self.sparse: list[SparseParams] = [NOTHING] * max_num_reqs
        self._requests: list[Request | None] = [None] * max_num_reqs
        self._rows: dict[str, int] = {}
        # Every column but token_ids, with its initial value: what moves with a row and is reset
        # when it is freed.
        self._columns: tuple[tuple[np.ndarray, int], ...] = (
            (self.num_tokens, 0),
            (self.num_prompt_tokens, 0),
            (self.num_computed_tokens, 0),
            (self.temperature, 0),
            (self.top_p, 1),
            (self.min_p, 0),
            (self.top_k, 0),
            (self.frequency_penalties, 0),
            (self.presence_penalties, 0),
            (self.repetition_penalties, 1),
            (self.stop_token_ids, -1),
            (self.keys, 0),
            (self.returns_logprobs, 0),
            (self.variants, 0),
        )

    @property
    def num_reqs(self) -> int:
        """How many rows are taken."""
        return len(self._rows)

    @property
    def req_ids(self) -> list[str]:
        """The ids of the requests, in the order of their rows."""
        return [request.request_id for request in self._requests if request is not None]

    @property
    def taken_rows(self) -> np.ndarray:
        """The rows that hold a request, in order (int32)."""
        return np.asarray(sorted(self._rows.values()), np.int32)

    @property
    def all_greedy(self) -> bool:
        """Whether no request samples at random; True of an empty table."""
        return not self.temperature.any()

    @property
    def all_random(self) -> bool:
        """Whether no request is greedy; True of an empty table."""
        return np.count_nonzero(self.temperature) == self.num_reqs

    @property
    def no_top_p(self) -> bool:
        """Whether no request leaves tokens out by top_p."""
        return bool((self.top_p >= 1).all())

    @property
    def no_top_k(self) -> bool:
        """Whether no request leaves tokens out by top_k."""
        return not ((self.top_k > 0) & (self.top_k < self.vocab_size)).any()

    @property
    def no_min_p(self) -> bool:
        """Whether no request leaves tokens out by min_p."""
        return not self.min_p.any()

    @property
    def no_penalties(self) -> bool:
        """Whether no request has a frequency, presence or repetition penalty."""
        return not len(self.get_request_indices_with_penalty())

    @property
    def no_allowed_token_ids(self) -> bool:
        """Whether every request may sample every token."""
        return all(sparse.allowed_token_ids is None for sparse in self.sparse)

    @property
    def no_prompt_logprob(self) -> bool:
        """Whether no request wants log probabilities of its prompt."""
        return all(sparse.num_prompt_logprobs is None for sparse in self.sparse)

    @property
    def max_num_logprobs(self) -> int | None:
        """The most log probabilities that a request wants of each new token; None: none wants."""
        return max(
            (s.num_logprobs for s in self.sparse if s.num_logprobs is not None), default=None
        )

    def row_of(self, req_id: str) -> int | None:
        """The row of a request, or None."""
        return self._rows.get(req_id)

    def request(self, row: int) -> Request:
        """The request in a row. AssertionError when the row is free, or no row."""
        request = self._requests[row] if 0 <= row < self.max_num_reqs else None
        assert request is not None, f"row {row} is free"
        return request

    def get_active_sampling_params(self, req_index: int) -> dict[str, Any]:
        """A row's temperature, top_p and top_k, and of min_p and the penalties those that change
        something.

        {} for a row that is free, and for a number that is no row.
        """
        if not 0 <= req_index < self.max_num_reqs or self._requests[req_index] is None:
            return {}
        rare = {
            "min_p": (self.min_p, 0.0),
            "frequency_penalty": (self.frequency_penalties, 0.0),
            "presence_penalty": (self.presence_penalties, 0.0),
            "repetition_penalty": (self.repetition_penalties, 1.0),
        }
        return {
            "temperature": float(self.temperature[req_index]),
            "top_p": float(self.top_p[req_index]),
            "top_k": int(self.top_k[req_index]),
        } | {
            name: float(column[req_index])
            for name, (column, neutral) in rare.items()
            if column[req_index] != neutral
        }

    def get_request_indices_with_penalty(self) -> np.ndarray:
        """Rows whose request has a frequency, presence or repetition penalty, in order (int32)."""
        added = (self.frequency_penalties != 0) | (self.presence_penalties != 0)
        return np.flatnonzero(added | (self.repetition_penalties != 1)).astype(np.int32)

    def begin_sequence(
        self,
        req_id: str,
        prompt_token_ids: Sequence[int] | np.ndarray,
        sampling: SamplingParams | None = None,
    ) -> None:
        """add_request() of a prompt with these sampling parameters, by default the greedy ones;
        same errors.
        """
        self.add_request(DocumentedRecord(req_id, prompt_token_ids, sampling))

    def prepare_batch(self) -> ModelRunBatch:
        """What the next step can compute. The table stays as it is: who ran the step sets
        num_computed_tokens.
        """
        return make_batch(self)

    def add_request(
        self, request: Request | DocumentedRequest, req_index: int | None = None
    ) -> None:
        """Put a request into row `req_index`, by default the lowest free one. Costs as much as the
        prompt is long.

        Tokens beyond max_model_len are cut off the prompt, then off output that the request brings
        along. Raises ValueError for an id that is here already, a row that is taken or a request
        that does not fit, IndexError for a row out of range, RuntimeError when all rows are taken;
        then nothing is changed.
        """
        entry = read_entry(request, self.max_model_len, self.vocab_size, self.page_tables)
        request, sampling = entry.request, entry.request.sampling
        row = free_row(request.request_id, req_index, self._rows, self._requests)
        self._requests[row] = request
        self._rows[request.request_id] = row
        self.token_ids[row, : len(entry.token_ids)] = entry.token_ids
        self.num_tokens[row] = len(entry.token_ids)
        self.num_prompt_tokens[row] = entry.num_prompt_tokens
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.top_k[row] = max(sampling.top_k, 0)
        self.frequency_penalties[row] = sampling.frequency_penalty
        self.presence_penalties[row] = sampling.presence_penalty
        self.repetition_penalties[row] = sampling.repetition_penalty
        self.stop_token_ids[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        self.keys[row] = request.key
        self.returns_logprobs[row] = sampling.num_logprobs is not None
        self.variants[row] = sampling.variant
        self.sparse[row] = entry.sparse
        for table, page_ids in zip(self.page_tables, entry.page_ids, strict=False):
            table.append(row, page_ids)

    def append_tokens(self, row: int, token_ids: Sequence[int] | np.ndarray) -> None:
        """Append output tokens to a taken row. ValueError when they exceed max_model_len; then
        nothing is appended.
        """
        self.request(row)
        start = int(self.num_tokens[row])
        end = start + len(token_ids)
        if end > self.max_model_len:
            raise InputError(
                explain(
                    f"{len(token_ids)} tokens after the {start} of row {row}",
                    f"{self.max_model_len} in all",
                    "End the request before.",
                )
            )
        self.token_ids[row, start:end] = token_ids
        self.num_tokens[row] = end

    def remove_request(self, req_id: str) -> int | None:
        """Free a request's row and reset all its columns; the row it had, or None for an unknown
        id.
        """
        row = self._rows.pop(req_id, None)
        if row is not None:
            _reset(self, row)
        return row

    def swap_states(self, i1: int, i2: int) -> None:
        """Exchange two taken rows, all columns included. AssertionError when either is free."""
        first, second = self.request(i1), self.request(i2)
        _exchange(self, i1, i2)
        self._rows[first.request_id], self._rows[second.request_id] = i2, i1

    def condense(self, empty_req_indices: Sequence[int]) -> None:
        """Pack the requests into rows 0..num_reqs-1: the last ones move into the free rows, lowest
        first.

        The table knows its free rows, so `empty_req_indices` may name them in any order, or leave
        some out.
        """
        del empty_req_indices
        last = self.max_num_reqs - 1
        for hole in range(self.num_reqs):
            if self._requests[hole] is not None:
                continue
            while self._requests[last] is None:
                last -= 1
            _exchange(self, hole, last)
            self._rows[self.request(hole).request_id] = hole

    def clear(self) -> None:
        """Free all rows; capacity stays."""
        for req_id in list(self._rows):
            self.remove_request(req_id)


def append_step(
    table: SequenceBuffer, rows: np.ndarray, token_ids: np.ndarray, counts: np.ndarray
) -> None:
    """`append_tokens` for many taken rows int [n], each named once: of token_ids int32 [n, steps]
    the first counts[i].

    ValueError when they exceed max_model_len; then nothing is appended.
    """
    starts = table.num_tokens[rows]
    ends = starts + counts
    if (ends > table.max_model_len).any():
        worst = int(ends.argmax())
        raise InputError(
            explain(
                f"{counts[worst]} tokens after the {starts[worst]} of row {rows[worst]}",
                f"{table.max_model_len} in all",
                "End the request before.",
            )
        )
    which, step = np.nonzero(np.arange(token_ids.shape[1]) < counts[:, None])
    table.token_ids[rows[which], starts[which] + step] = token_ids[which, step]
    table.num_tokens[rows] = ends


def _make_tokens(num_rows: int, max_model_len: int) -> np.ndarray:
    """int32 zeros [num_rows, max_model_len]; UnsupportedError when memory cannot hold them."""
    try:
        return np.zeros((num_rows, max_model_len), np.int32)
    except (MemoryError, ValueError, OverflowError):
        raise UnsupportedError(
            explain(
                f"a table of {num_rows} rows of {max_model_len} tokens",
                "what this machine's memory holds",
                "Lower max_model_len or max_num_seqs.",
            )
        ) from None


def _check_counts(counts: Sequence[int], page_sizes: Sequence[int]) -> None:
    if min(*counts, *page_sizes) < 1 or not page_sizes:
        raise InputError(
            explain(
                f"a row table of {[*counts, *page_sizes]} (the last: page sizes)",
                "counts of at least 1, at least one page size",
                "Correct them.",
            )
        )


def _reset(table: SequenceBuffer, row: int) -> None:
    """Bring a row back to its initial values."""
    table.token_ids[row, : table.num_tokens[row]] = 0
    for column, initial in table._columns:
        column[row] = initial
    for pages in table.page_tables:
        pages.reset(row)
    table.sparse[row] = NOTHING
    table._requests[row] = None


def _exchange(table: SequenceBuffer, i1: int, i2: int) -> None:
    """Exchange two rows, taken or free, but for the ids' index."""
    width = max(table.num_tokens[i1], table.num_tokens[i2])
    pair, other = [i1, i2], [i2, i1]
    table.token_ids[pair, :width] = table.token_ids[other, :width]
    for column, _ in table._columns:
        column[pair] = column[other]
    for pages in table.page_tables:
        pages.exchange(i1, i2)
    table.sparse[i1], table.sparse[i2] = table.sparse[i2], table.sparse[i1]
    table._requests[i1], table._requests[i2] = table._requests[i2], table._requests[i1]
