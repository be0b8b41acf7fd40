"""SequenceBuffer, the loop's table of rows: tokens, counts and sampling parameters of every admitted request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from enginebay.errors import InputError, explain
from enginebay.types import MAX_STOP_TOKENS, Request


class SequenceBuffer:
    """Host state of up to `max_num_reqs` requests, one row each; methods change it in place and return None.

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

    `token_ids` is allocated at full size: the operating system hands its zeroed pages out when they are first written,
    and a row's tokens lie together, so 256 rows of 128k tokens cost what their requests use and not 128 MB.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        vocab_size: int,
        page_sizes: Sequence[int],
    ) -> None:
        """`page_sizes` has the page size of each cache group. Raises InputError for a count below 1."""
        counts = [max_num_reqs, max_model_len, max_num_batched_tokens, vocab_size, *page_sizes]
        if min(counts) < 1 or not page_sizes:
            raise InputError(
                explain(
                    f"a row table of {counts} (the last: page sizes)",
                    "counts of at least 1, at least one page size",
                    "Correct them.",
                )
            )
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.vocab_size = vocab_size
        self.page_sizes = list(page_sizes)
        self.token_ids = np.zeros((max_num_reqs, max_model_len), np.int32)
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
        self._requests: list[Request | None] = [None] * max_num_reqs
        self._rows: dict[str, int] = {}
        # Every column but token_ids, with its initial value: what moves with a row and is reset when it is freed.
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
        )

    @property
    def num_reqs(self) -> int:
        """How many rows are taken."""
        return len(self._rows)

    @property
    def req_ids(self) -> list[str]:
        """The ids of the requests, in the order of their rows."""
        return [request.request_id for request in self._requests if request is not None]

    def row_of(self, req_id: str) -> int | None:
        """The row of a request, or None."""
        return self._rows.get(req_id)

    def request(self, row: int) -> Request:
        """The request in a row. AssertionError when the row is free."""
        request = self._requests[row]
        assert request is not None, f"row {row} is free"
        return request

    def add_request(self, request: Request, req_index: int | None = None) -> None:
        """Put a request into row `req_index`, by default the lowest free one. Costs as much as the prompt is long.

        A prompt longer than max_model_len is cut to its first max_model_len tokens. Raises ValueError for an id that
        is here already or a row that is taken, IndexError for a row out of range, RuntimeError when all rows are taken.
        """
        row = self._row_for(request.request_id, req_index)
        prompt = request.prompt_token_ids[: self.max_model_len]
        sampling = request.sampling
        self._requests[row] = request
        self._rows[request.request_id] = row
        self.token_ids[row, : len(prompt)] = prompt
        self.num_tokens[row] = self.num_prompt_tokens[row] = len(prompt)
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.top_k[row] = max(sampling.top_k, 0)
        self.frequency_penalties[row] = sampling.frequency_penalty
        self.presence_penalties[row] = sampling.presence_penalty
        self.repetition_penalties[row] = sampling.repetition_penalty
        self.stop_token_ids[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        self.keys[row] = request.key

    def append_tokens(self, row: int, token_ids: Sequence[int] | np.ndarray) -> None:
        """Append output tokens to a taken row. ValueError when they exceed max_model_len; then nothing is appended."""
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
        """Free a request's row and reset all its columns; the row it had, or None for an unknown id."""
        row = self._rows.pop(req_id, None)
        if row is not None:
            self._requests[row] = None
            self._reset(row)
        return row

    def swap_states(self, i1: int, i2: int) -> None:
        """Exchange two taken rows, all columns included. AssertionError when either is free."""
        first, second = self.request(i1), self.request(i2)
        self._exchange(i1, i2)
        self._rows[first.request_id], self._rows[second.request_id] = i2, i1

    def condense(self, empty_req_indices: Sequence[int]) -> None:
        """Pack the requests into rows 0..num_reqs-1: the last ones move into the free rows, lowest first.

        The table knows its free rows, so `empty_req_indices` may name them in any order, or leave some out.
        """
        del empty_req_indices
        last = self.max_num_reqs - 1
        for hole in range(self.num_reqs):
            if self._requests[hole] is not None:
                continue
            while self._requests[last] is None:
                last -= 1
            self._exchange(hole, last)
            self._rows[self.request(hole).request_id] = hole

    def clear(self) -> None:
        """Free all rows; capacity stays."""
        for req_id in list(self._rows):
            self.remove_request(req_id)

    def _row_for(self, req_id: str, req_index: int | None) -> int:
        if req_id in self._rows:
            raise InputError(
                explain(
                    f"request id {req_id!r}",
                    "an id that is not in the table",
                    f"It is in row {self._rows[req_id]}: remove it first.",
                )
            )
        if req_index is None:
            row = next((row for row, request in enumerate(self._requests) if request is None), None)
            if row is None:
                given = f"request {req_id!r} for a table whose {self.max_num_reqs} rows are taken"
                raise RuntimeError(
                    explain(given, "a free row", "Remove a request first, or raise max_num_reqs.")
                )
            return row
        if not 0 <= req_index < self.max_num_reqs:
            raise IndexError(
                explain(
                    f"row {req_index}",
                    f"0 to {self.max_num_reqs - 1}",
                    "Leave req_index out for the lowest free row.",
                )
            )
        if self._requests[req_index] is not None:
            raise InputError(
                explain(
                    f"row {req_index}, which is taken",
                    "a free row",
                    "Leave req_index out for the lowest free row.",
                )
            )
        return req_index

    def _reset(self, row: int) -> None:
        self.token_ids[row, : self.num_tokens[row]] = 0
        for column, initial in self._columns:
            column[row] = initial

    def _exchange(self, i1: int, i2: int) -> None:
        """Exchange two rows, taken or free, but for the ids' index."""
        width = max(self.num_tokens[i1], self.num_tokens[i2])
        pair, other = [i1, i2], [i2, i1]
        self.token_ids[pair, :width] = self.token_ids[other, :width]
        for column, _ in self._columns:
            column[pair] = column[other]
        self._requests[i1], self._requests[i2] = self._requests[i2], self._requests[i1]
