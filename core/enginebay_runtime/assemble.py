"""Makes commands from the rows of a StepPlan: sorts and pads rows, finds changed page-table
entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from enginebay.contracts.cache import Lease, Ledger
from enginebay.contracts.commands import (
    DecodeInputs,
    KnownTokens,
    PrefillInputs,
    RowUpdate,
    Step,
    VerifyInputs,
    WriteRows,
)
from enginebay.contracts.engine import RowPlan
from enginebay.contracts.step_key import StepKey, StepNeeds
from enginebay.errors import InternalError
from enginebay.ops import prefill_columns as columns
from enginebay.ops.row_columns import neutral_columns, write_row
from enginebay.types import Request, StepVariant
from enginebay_runtime.rows import RowTable


def sorted_for_attention(rows: Sequence[RowPlan]) -> np.ndarray:
    """Indices that sort rows into AttnBatch's order: single tokens with a prefix, then rows without
    a prefix, then the others.
    """
    kinds = [
        0 if r.num_tokens == 1 and r.num_computed else 1 if not r.num_computed else 2 for r in rows
    ]
    return np.argsort(np.asarray(kinds), kind="stable")


class TableCopies:
    """A copy of the page tables that the executor has, to find the entries that have changed."""

    def __init__(self, ledger: Ledger, num_rows: int, widths: Mapping[str, int]) -> None:
        """`widths`: the largest number of pages per row, by cache group."""
        self._ledger, self._num_rows, self._widths = ledger, num_rows, widths
        self.forget()

    def forget(self) -> None:
        """The executor has new tables: all their entries are 0."""
        self._sent = {g: np.zeros((self._num_rows, w), np.int32) for g, w in self._widths.items()}

    def changes(self, leases: Sequence[Lease], num_pages: int) -> dict[str, np.ndarray]:
        """Changed entries (row, column, page), int32 [n, 3] by group, among the first `num_pages`
        pages of each lease. Groups without changes are left out. The entries count as sent.

        Entries after a row's pages need not be 0: a step reads only the pages of its tokens.
        """
        row_ids = [lease.row for lease in leases]
        changes = {}
        for group, sent in self._sent.items():
            now = np.zeros((len(leases), min(num_pages, sent.shape[1])), np.int32)
            self._ledger.write_table(group, leases, now)
            different = now != sent[row_ids, : now.shape[1]]
            if not different.any():
                continue
            sent[row_ids, : now.shape[1]] = now
            place, column = np.nonzero(different)
            pages = now[place, column]
            last = now.shape[1] - (now[:, ::-1] != 0).argmax(axis=1)
            is_needed = (pages != 0) | (column < last[place])
            entries = np.stack([np.asarray(row_ids)[place], column, pages], axis=1)
            if is_needed.any():
                changes[group] = entries[is_needed].astype(np.int32)
        return changes


def prefill_command(
    rows: Sequence[RowPlan], key: StepKey, table: RowTable, sent: TableCopies, hidden_size: int
) -> Step:
    """The Step that prefills `rows` with the program `key`."""
    bucket, order = key.bucket, sorted_for_attention(rows)
    token_ids = np.zeros(bucket.tokens, np.int32)
    ints, floats = empty_plan(bucket.seqs, table.max_num_reqs)
    targets = np.full(bucket.tokens * key.full_vocab, -1, np.int32)
    embeds = np.zeros((bucket.tokens * key.embeds, hidden_size), np.float32)
    spans = [(0, 0)] * len(rows)
    start = 0
    for place, index in enumerate(order):
        row, request = rows[index], table.request(rows[index].row)
        stop, end = start + row.num_tokens, row.num_computed + row.num_tokens
        token_ids[start:stop] = table.token_ids[row.row, row.num_computed : end]
        fill_columns(ints[place], floats[place], row, request)
        ints[place, columns.ADAPTER] = table.adapters[row.row]
        if key.full_vocab and row.returns_prompt:
            # The token after the last prompt token is sampled, so it is no target.
            own = request.prompt_token_ids[row.num_computed + 1 : end + 1]
            targets[start : start + len(own)] = own
            spans[index] = start, len(own)
        if key.embeds and request.embeds is not None:
            request.embeds.copy_to(embeds[start:stop], row.num_computed)
        start = stop
    places = np.empty(len(rows), np.int32)
    places[order] = np.arange(len(rows))
    sampled = [row for row in rows if row.samples]
    return Step(
        key,
        PrefillInputs(
            token_ids,
            ints,
            floats,
            targets=targets if key.full_vocab else None,
            embeds=embeds if key.embeds else None,
        ),
        places,
        sent.changes([row.lease for row in rows], bucket.pages_per_seq),
        returns_logprobs=bool(table.returns_logprobs[[row.row for row in sampled]].any()),
        returns_all=wants_all(sampled, table),
        spans=tuple(spans) if key.full_vocab else (),
    )


def wants_all(rows: Sequence[RowPlan], table: RowTable) -> bool:
    """Whether the request of any row asks for full-vocabulary log-probabilities."""
    has_logprobs = table.returns_logprobs
    return bool(has_logprobs.any()) and any(
        has_logprobs[row.row] and table.request(row.row).sampling.returns_all for row in rows
    )


def takes_embeds(row: RowPlan, table: RowTable) -> bool:
    """Whether a row's part of a prefill has positions with embeddings."""
    embeds = table.request(row.row).embeds
    return embeds is not None and embeds.touch(row.num_computed, row.num_tokens)


def prefill_writes(rows: Sequence[RowPlan], table: RowTable) -> WriteRows:
    """What must be written to rows before a prefill of `rows`."""
    known, used, updates = [], [], []
    for row in rows:
        sampling = table.request(row.row).sampling
        reads = sampling.penalises or sampling.reads_tokens
        if reads and 0 < row.num_computed == row.lease.num_cached:  # after a cached prefix
            known.append(KnownTokens(row.row, table.token_ids[row.row, : row.num_computed].copy()))
        if row.decodes and row.update:
            updates.append(RowUpdate(row.row, row.update))
        elif row.samples and not row.decodes:  # the plan's values replace the request's
            values = {value.name: value for value in (*sampling.processors, *row.update)}
            used.append(RowUpdate(row.row, tuple(values.values())))
    return WriteRows(tuple(known), tuple(used), tuple(updates))


def needs_of(table: RowTable, rows: Sequence[int] | np.ndarray) -> StepNeeds:
    """The smallest step variant, and the logits processors, that rows need."""
    variant = StepVariant(int(table.variants[rows].max()))
    if variant is not StepVariant.FULL:
        return StepNeeds(variant)
    used = (table.request(int(row)).sampling.processors for row in rows)
    return StepNeeds(variant, frozenset(one.name for processors in used for one in processors))


def empty_plan(size: int, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Columns of padding, int32 [size, NUM_INT_COLUMNS] and f32 [size, NUM_FLOAT_COLUMNS] of
    `columns`, with row id `num_rows`.
    """
    floats, values = neutral_columns(size)
    ints = np.zeros((size, columns.NUM_INT_COLUMNS), np.int32)
    ints[:, columns.ROW], ints[:, columns.NUM_LOGPROBS] = num_rows, -1
    ints[:, columns.STOP_IDS :] = -1
    ints[:, columns.PARAMS : columns.STOP_IDS] = values
    return ints, floats


def fill_columns(ints: np.ndarray, floats: np.ndarray, row: RowPlan, request: Request) -> None:
    """Write a row of a prefill and its request into one row of a plan's columns."""
    sampling = request.sampling
    write_row(floats, ints[columns.PARAMS : columns.STOP_IDS], sampling.params)
    ints[columns.ROW] = row.row
    ints[columns.Q_LEN] = row.num_tokens
    ints[columns.KV_LEN] = row.num_computed + row.num_tokens
    ints[columns.SAMPLES] = columns.DECODES if row.decodes else row.samples
    ints[columns.INDEX] = request.index
    ints[columns.KEY_HI : columns.KEY_LO + 1] = np.asarray(request.key, np.uint32).view(np.int32)
    ints[columns.MAX_LENGTH] = len(request.prompt_token_ids) + sampling.max_tokens
    ints[columns.PROMPT_LENGTH] = len(request.prompt_token_ids)
    ints[columns.NUM_LOGPROBS] = -1 if sampling.num_logprobs is None else sampling.num_logprobs
    ints[columns.STOP_IDS : columns.STOP_IDS + len(sampling.stop_token_ids)] = (
        sampling.stop_token_ids
    )


def decode_command(
    rows: Sequence[RowPlan],
    key: StepKey,
    places: np.ndarray,
    num_steps: int,
    table: RowTable,
    sent: TableCopies,
) -> Step:
    """The Step that decodes `rows`, each at its place in the bucket, with the program `key`."""
    if key.full_vocab and num_steps > 1:
        raise InternalError(
            f"{num_steps} steps of a decode that returns full-vocabulary log-probabilities"
        )
    row_ids = _padded_ids(rows, key, places, table)
    inputs = DecodeInputs(row_ids, np.asarray(num_steps, np.int32))
    return _rows_command(rows, key, inputs, places, table, sent)


def verify_command(
    rows: Sequence[RowPlan], key: StepKey, most: int, table: RowTable, sent: TableCopies
) -> Step:
    """The Step that verifies the drafts of `rows`, at most `most` per row."""
    places = np.arange(len(rows), dtype=np.int32)
    draft_ids = np.full((key.bucket.seqs, most), -1, np.int32)
    for place, row in enumerate(rows):
        draft_ids[place, : len(row.draft_token_ids)] = row.draft_token_ids
    inputs = VerifyInputs(_padded_ids(rows, key, places, table), draft_ids)
    return _rows_command(rows, key, inputs, places, table, sent)


def _padded_ids(
    rows: Sequence[RowPlan], key: StepKey, places: np.ndarray, table: RowTable
) -> np.ndarray:
    """int32 [S]: the row at each place of the bucket, R where there is none."""
    row_ids = np.full(key.bucket.seqs, table.max_num_reqs, np.int32)
    row_ids[places] = [row.row for row in rows]
    return row_ids


def _rows_command(
    rows: Sequence[RowPlan],
    key: StepKey,
    inputs: DecodeInputs | VerifyInputs,
    places: np.ndarray,
    table: RowTable,
    sent: TableCopies,
) -> Step:
    return Step(
        key,
        inputs,
        places,
        sent.changes([row.lease for row in rows], key.bucket.pages_per_seq),
        returns_logprobs=bool(table.returns_logprobs[inputs.row_ids[places]].any()),
        returns_all=key.full_vocab,
    )
