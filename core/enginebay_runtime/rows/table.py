"""RowTable: the host's table of rows, with tokens, counts, pages and the request of every row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from enginebay.errors import InputError, UnsupportedError, explain
from enginebay.types import Request
from enginebay_runtime.rows.page_table import PageTable


class RowTable:
    """The host's state of up to `max_num_reqs` requests, with one row for each.

    Columns (NumPy, first axis is the row; a free row holds zeros)::

        token_ids            int32 [max_num_reqs, max_model_len]   prompt, output, and 0 after them
        num_tokens           int32 [max_num_reqs]                  prompt and output tokens
        num_prompt_tokens    int32 [max_num_reqs]
        num_computed_tokens  int32 [max_num_reqs]                  tokens that are in the cache
        returns_logprobs     bool [max_num_reqs]                   whether to return logprobs
        variants             int8 [max_num_reqs]                   lowest StepVariant of the request
        adapters             int32 [max_num_reqs]                  place of the adapter; 0: none

    `requests` has the Request of each row, or None. `page_tables` has one PageTable for each entry
    of page_sizes, with the pages that the engine's ledger has leased to each row.

    `token_ids` is allocated at full size. The operating system provides zeroed memory pages only
    when they are first written, and the tokens of a row are contiguous; so 256 rows of 128k tokens
    use as much memory as their requests need, and not 128 MB.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        vocab_size: int,
        page_sizes: Sequence[int],
    ) -> None:
        """`page_sizes`: the page size of each cache group. InputError for a number below 1."""
        _check_counts([max_num_reqs, max_model_len, max_num_batched_tokens, vocab_size], page_sizes)
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.vocab_size = vocab_size
        self.page_sizes = list(page_sizes)
        self.token_ids = _make_tokens(max_num_reqs, max_model_len)
        self.num_tokens = np.zeros(max_num_reqs, np.int32)
        self.num_prompt_tokens = np.zeros(max_num_reqs, np.int32)
        self.num_computed_tokens = np.zeros(max_num_reqs, np.int32)
        self.returns_logprobs = np.zeros(max_num_reqs, bool)
        self.variants = np.zeros(max_num_reqs, np.int8)
        self.adapters = np.zeros(max_num_reqs, np.int32)
        self.page_tables = tuple(
            PageTable(max_num_reqs, -(-max_model_len // size), size) for size in page_sizes
        )
        self.requests: list[Request | None] = [None] * max_num_reqs
        self.row_by_id: dict[str, int] = {}
        # Like token_ids and pages, these columns move with a row and are reset when it is freed.
        self.columns = (
            self.num_tokens,
            self.num_prompt_tokens,
            self.num_computed_tokens,
            self.returns_logprobs,
            self.variants,
            self.adapters,
        )

    @property
    def num_reqs(self) -> int:
        """Number of rows that hold a request."""
        return len(self.row_by_id)

    @property
    def taken_rows(self) -> np.ndarray:
        """Indices of the rows that hold a request, int32, in ascending order."""
        return np.asarray(sorted(self.row_by_id.values()), np.int32)

    def row_of(self, req_id: str) -> int | None:
        """Return the row of a request, or None."""
        return self.row_by_id.get(req_id)

    def request(self, row: int) -> Request:
        """Return the request in a row. AssertionError when the row is free or out of range."""
        request = self.requests[row] if 0 <= row < self.max_num_reqs else None
        assert request is not None, f"row {row} is free"
        return request

    def add_request(self, request: Request, req_index: int | None = None) -> int:
        """Put a request into row `req_index`, by default the lowest free row, and return the row.
        The prompt is copied, up to max_model_len tokens.

        InputError for an id that is in the table, and for a row that is taken; IndexError for a row
        out of range; RuntimeError when all rows are taken. After an error the table is unchanged.
        """
        row = self._free_row(request.request_id, req_index)
        self.requests[row] = request
        self.row_by_id[request.request_id] = row
        num_tokens = min(len(request.prompt_token_ids), self.max_model_len)
        self.token_ids[row, :num_tokens] = request.prompt_token_ids[:num_tokens]
        self.num_tokens[row] = self.num_prompt_tokens[row] = num_tokens
        self.returns_logprobs[row] = request.sampling.num_logprobs is not None
        self.variants[row] = request.sampling.variant
        return row

    def append_tokens(self, row: int, token_ids: Sequence[int] | np.ndarray) -> None:
        """Append output tokens to a taken row. InputError, and no change, when the row would exceed
        max_model_len.
        """
        self.request(row)
        start = int(self.num_tokens[row])
        end = start + len(token_ids)
        if end > self.max_model_len:
            raise self._too_long(len(token_ids), start, row)
        self.token_ids[row, start:end] = token_ids
        self.num_tokens[row] = end

    def append_step(self, rows: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        """Append the first counts[i] tokens of token_ids[i] to row rows[i], for n taken rows.

        rows: int [n], all different. token_ids: int32 [n, steps]. InputError, and no change, when a
        row would exceed max_model_len.
        """
        starts = self.num_tokens[rows]
        ends = starts + counts
        if (ends > self.max_model_len).any():
            worst = int(ends.argmax())
            raise self._too_long(counts[worst], starts[worst], rows[worst])
        which, step = np.nonzero(np.arange(token_ids.shape[1]) < counts[:, None])
        self.token_ids[rows[which], starts[which] + step] = token_ids[which, step]
        self.num_tokens[rows] = ends

    def _too_long(self, count: int, start: int, row: int) -> InputError:
        return InputError(
            f"{count} tokens after the {start} of row {row}",
            f"at most {self.max_model_len} tokens in all",
            "End the request earlier, or raise --max-model-len.",
        )

    def remove_request(self, req_id: str) -> int | None:
        """Free the row of a request and reset its columns. Returns the row, or None for an unknown
        id.
        """
        row = self.row_by_id.pop(req_id, None)
        if row is not None:
            self.token_ids[row, : self.num_tokens[row]] = 0
            for column in self.columns:
                column[row] = 0
            for pages in self.page_tables:
                pages.reset(row)
            self.requests[row] = None
        return row

    def clear(self) -> None:
        """Free all rows."""
        for req_id in list(self.row_by_id):
            self.remove_request(req_id)

    def _free_row(self, req_id: str, req_index: int | None) -> int:
        if req_id in self.row_by_id:
            todo = f"It is in row {self.row_by_id[req_id]}: remove it first."
            raise InputError(f"request id {req_id!r}", "an id that is not in the table", todo)
        default = "Leave req_index out for the lowest free row."
        if req_index is None:
            if self.num_reqs < self.max_num_reqs:
                return self.requests.index(None)
            given = f"request {req_id!r} for a table whose {self.max_num_reqs} rows are taken"
            todo = "Remove a request first, or raise max_num_reqs."
            raise RuntimeError(explain(given, "a free row", todo))
        if not 0 <= req_index < self.max_num_reqs:
            raise IndexError(explain(f"row {req_index}", f"0 to {self.max_num_reqs - 1}", default))
        if self.requests[req_index] is not None:
            raise InputError(f"row {req_index}, which is taken", "a free row", default)
        return req_index


def _make_tokens(num_rows: int, max_model_len: int) -> np.ndarray:
    """Make int32 zeros [num_rows, max_model_len]; UnsupportedError when memory is too small."""
    try:
        return np.zeros((num_rows, max_model_len), np.int32)
    except (MemoryError, ValueError, OverflowError):
        raise UnsupportedError(
            f"a table of {num_rows} rows of {max_model_len} tokens",
            "a size that fits the memory of this machine",
            "Lower --max-model-len or --max-num-seqs.",
        ) from None


def _check_counts(counts: Sequence[int], page_sizes: Sequence[int]) -> None:
    if min(*counts, *page_sizes) < 1 or not page_sizes:
        raise InputError(
            f"a row table of {[*counts, *page_sizes]} (the last: page sizes)",
            "numbers of at least 1, and at least one page size",
            "Raise the numbers below 1, and pass a page size for each cache group.",
        )
