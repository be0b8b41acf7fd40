"""ModelRunBatch: the tokens of a row table that are not computed yet, as flat host arrays."""

from __future__ import annotations

import dataclasses

import numpy as np

from enginebay_runtime.rows import RowTable


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeRowInfo:
    """A row that decodes: computing its last token lets the next one be sampled."""

    row: int
    req_id: str
    token_id: int
    """The row's last token, which is computed next."""
    position: int
    """Position of that token, from 0."""
    num_output_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class ModelRunBatch:
    """The input of one step: first the decoding rows with one token each, then chunks of the other
    rows.

    The arrays are copies (int32). `token_ids` and `positions` are flat, row after row::

        rows        [num_rows]            rows of the table
        query_lens  [num_rows]            tokens of each row in this batch
        kv_lens     [num_rows]            computed tokens of each row after this batch
        token_ids   [num_tokens]
        positions   [num_tokens]          within each row, from 0
        page_ids    [num_rows, max_pages_per_req] for each cache group
    """

    req_ids: tuple[str, ...]
    rows: np.ndarray
    query_lens: np.ndarray
    kv_lens: np.ndarray
    token_ids: np.ndarray
    positions: np.ndarray
    page_ids: tuple[np.ndarray, ...]
    decode_rows: tuple[DecodeRowInfo, ...]

    @property
    def num_rows(self) -> int:
        """Number of rows with at least one token."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all rows."""
        return len(self.token_ids)


def make_batch(table: RowTable) -> ModelRunBatch:
    """Make a batch of at most max_num_batched_tokens tokens, in the order of rows. Tokens beyond
    the limit are left for the next batch.
    """
    rows = table.taken_rows
    pending = table.num_tokens[rows] - table.num_computed_tokens[rows]
    decoding = (pending == 1) & (table.num_tokens[rows] > table.num_prompt_tokens[rows])
    order = np.argsort(~decoding, kind="stable")
    ends = np.minimum(np.cumsum(pending[order]), table.max_num_batched_tokens)
    query_lens = np.diff(ends, prepend=0)
    taken = query_lens > 0
    rows, query_lens, decoding = rows[order][taken], query_lens[taken], decoding[order][taken]
    starts = table.num_computed_tokens[rows]
    req_ids = tuple(table.request(int(row)).request_id for row in rows)
    chunks = [
        np.arange(start, start + n, dtype=np.int32)
        for start, n in zip(starts, query_lens, strict=True)
    ]
    tokens = [table.token_ids[row, chunk] for row, chunk in zip(rows, chunks, strict=True)]
    empty = np.zeros(0, np.int32)
    return ModelRunBatch(
        req_ids=req_ids,
        rows=rows,
        query_lens=query_lens.astype(np.int32),
        kv_lens=(starts + query_lens).astype(np.int32),
        token_ids=np.concatenate([empty, *tokens]),
        positions=np.concatenate([empty, *chunks]),
        page_ids=tuple(pages.page_ids[rows] for pages in table.page_tables),
        decode_rows=tuple(_decode_row(table, int(row)) for row in rows[decoding]),
    )


def _decode_row(table: RowTable, row: int) -> DecodeRowInfo:
    length = int(table.num_tokens[row])
    return DecodeRowInfo(
        row=row,
        req_id=table.request(row).request_id,
        token_id=int(table.token_ids[row, length - 1]),
        position=length - 1,
        num_output_tokens=length - int(table.num_prompt_tokens[row]),
    )
